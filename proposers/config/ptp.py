"""`speculative_config` of method ptp: its own options, the targets it is served on, and the blocks it sets aside."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, SkipValidation
from vllm.config.utils import config
from vllm.platforms import current_platform

from vllm_mtpc.config.ptp_config import PtpConfig
from vllm_mtpc.errors import ServeConfigError
from vllm_mtpc.proposers.config import refusals
from vllm_mtpc.proposers.config.mtpc import COMMON_KEYS, MtpcSpeculativeConfig, weights_of
from vllm_mtpc.proposers.config.plan import Plan, merged_plan, most_drafts, scheduled_plan, two_pass_plan
from vllm_mtpc.proposers.config.schedule import Schedule, few_lengths, merged

logger = logging.getLogger("vllm.mtpc")

CPU_BLOCK_SIZE = 32  # the smallest vLLM's CPU attention takes: each group of rows owns blocks of this size


@config
class PtpSpeculativeConfig(MtpcSpeculativeConfig):
    """Options of a PTP head.

    draft_pass: draft inside the target's own pass, or in a second one. max_aux_rows: auxiliary rows of a whole batch;
    larger batches draft less. aux_rows_per_request: at most so many for one request (merged pass). group_sizes: one
    table of group sizes per batch size, or sizes by how sure each request's drafts are. u_table: 256 embeddings
    instead of one computed for each u.
    """

    user_keys: ClassVar[tuple[str, ...]] = (
        *COMMON_KEYS,
        *("draft_pass", "max_aux_rows", "aux_rows_per_request", "group_sizes", "u_table"),
    )
    shown: ClassVar[tuple[str, ...]] = (
        *("model", "variant", "window", "lora_rank", "num_speculative_tokens", "num_speculative_tokens_per_batch_size"),
        *("draft_pass", "max_aux_rows", "group_sizes"),
    )
    has_distribution: ClassVar[bool] = False

    method: Literal["ptp"] | None = None  # type: ignore[assignment]
    draft_sample_method: Literal["greedy"] = "greedy"
    head: SkipValidation[PtpConfig] = None  # type: ignore[assignment]
    mask_drafts: bool = False
    draft_pass: Literal["merged", "two-pass"] = "two-pass"
    max_aux_rows: int = Field(default=256, ge=2)
    aux_rows_per_request: int | None = Field(default=None, ge=1)
    group_sizes: Literal["static", "dynamic"] = "static"
    u_table: bool = False

    def plan(self, max_num_seqs: int) -> Plan:
        """Groups of auxiliary rows by batch size."""
        from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

        ranges, drafts = self.num_speculative_tokens_per_batch_size, self.num_speculative_tokens
        if ranges is None:
            return self._plan_of(drafts, max_num_seqs)
        by_batch = build_dynamic_sd_schedule_lookup(ranges, max_num_seqs, drafts)[1:]
        return scheduled_plan(lambda count: self._plan_of(count, max_num_seqs), by_batch)

    def _plan_of(self, drafts: int, max_num_seqs: int) -> Plan:
        rows, is_dynamic = self.max_aux_rows, self.group_sizes == "dynamic"
        if self.draft_pass == "two-pass":
            return two_pass_plan(self.head, drafts, max_num_seqs, rows)
        return merged_plan(self.head, drafts, max_num_seqs, rows, self.aux_rows_per_request, is_dynamic)

    def default_schedule(self) -> Schedule:
        """As many drafts as the rows of each batch size can give: others would be verified for nothing.

        On a GPU few lengths: vLLM captures graphs for each.
        """
        largest = self.max_aux_rows + 1  # a batch with more requests than rows is not drafted for
        plan = self._plan_of(self.num_speculative_tokens, largest)
        by_batch = [most_drafts(plan.bucket(n), self.head.variant, plan.leading) for n in range(1, largest + 1)]
        by_batch = [min(drafts, self.num_speculative_tokens) for drafts in by_batch]
        return merged(by_batch if current_platform.is_cpu() else few_lengths(by_batch))

    def speculator(self) -> str:
        return "ptp.merged.MergedSpeculator" if self.draft_pass == "merged" else "ptp.ptp_speculator.PtpSpeculator"

    def device_bytes(self, vllm_config: Any) -> int:
        return weights_of(Path(self.model_folder))  # what else it takes are rows of the target

    def reserved_blocks(self, vllm_config: Any, kv_cache_config: Any) -> int:
        if not kv_cache_config.kv_cache_groups:
            return 0
        longest = vllm_config.model_config.max_model_len
        block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        blocks = self.plan(vllm_config.scheduler_config.max_num_seqs).num_blocks(block_size)
        needed = -(-longest // block_size) + 1  # vLLM keeps one block for itself
        if kv_cache_config.num_blocks - blocks < needed:
            raise ServeConfigError(
                f"the KV cache holds {kv_cache_config.num_blocks} blocks of {block_size} tokens; {blocks} of them are "
                f"for auxiliary rows and {needed} for one request of {longest} tokens; raise --gpu-memory-utilization "
                f"(or --kv-cache-memory-bytes), or lower max_aux_rows={self.max_aux_rows} or --max-num-seqs"
            )
        return blocks

    def check_target(self) -> None:
        refusals.refuse(refusals.of_ptp_target(self))

    def check_engine(self, vllm_config: Any) -> None:
        """Refuse what PTP cannot be served with, once the engine's configuration is known; choose its block size."""
        refusals.refuse(refusals.of_ptp_engine(vllm_config))
        choose_attention(vllm_config.attention_config, self.draft_pass)
        if self.draft_pass == "merged":
            from vllm.config.compilation import CUDAGraphMode

            # the target's pass is the student's, whose rows no captured graph has
            vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
        cache = vllm_config.cache_config
        if vllm_config.device_config.device_type == "cpu" and not cache.user_specified_block_size:
            cache.block_size = CPU_BLOCK_SIZE


def choose_attention(attention_config: Any, draft_pass: str) -> None:
    """Choose FLASH_ATTN where the user named no attention backend and vLLM would take FlashInfer.

    vLLM prefers FlashInfer on GPUs of compute capability 10 (platforms/cuda.py). It sorts a batch by length, and groups
    of auxiliary rows follow all of a batch's own rows. It plans each pass on the host, which no CUDA graph holds.

    Args:
        attention_config: vLLM's; `backend` may change.
        draft_pass: "merged" or "two-pass".

    Raises:
        ServeConfigError: the user named FlashInfer for the merged pass.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    named = attention_config.backend
    if named is AttentionBackendEnum.FLASHINFER and draft_pass == "merged":
        raise ServeConfigError(
            "attention backend FLASHINFER with draft_pass 'merged': it sorts a batch by length, which groups of rows "
            'do not survive; type --attention-backend FLASH_ATTN, or "draft_pass": "two-pass"'
        )
    if named is None and current_platform.is_cuda() and current_platform.is_device_capability_family(100):
        why = "sorts a batch by length" if draft_pass == "merged" else "runs the drafts' pass without CUDA graphs"
        logger.warning("method 'ptp': attention backend FLASH_ATTN, because FlashInfer %s", why)
        attention_config.backend = AttentionBackendEnum.FLASH_ATTN
