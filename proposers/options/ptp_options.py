"""`speculative_config` of method ptp: its options, their checks, and the KV blocks that it reserves."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, SkipValidation
from vllm.config.utils import config
from vllm.platforms import current_platform

from vllm_mtpc.config.ptp_config import PtpConfig
from vllm_mtpc.errors import ServeConfigError
from vllm_mtpc.heads.ptp.row_groups import RowGroups, plan_groups
from vllm_mtpc.plan.draft_schedule import Schedule, expand_schedule, limit_lengths, merge_ranges
from vllm_mtpc.proposers.options import refusals
from vllm_mtpc.proposers.options.circuit_options import COMMON_KEYS, MtpcSpeculativeConfig
from vllm_mtpc.proposers.options.switches import logger

CPU_BLOCK_SIZE = 32  # the smallest of vLLM's CPU attention; each group of rows owns blocks of this size


@config
class PtpSpeculativeConfig(MtpcSpeculativeConfig):
    """vLLM's SpeculativeConfig for a PTP head.

    Attributes:
        draft_pass: whether drafts come from the target's own pass ("merged") or from a second one.
        max_aux_rows: auxiliary rows of a whole batch; larger batches draft less.
    """

    user_keys: ClassVar[tuple[str, ...]] = (*COMMON_KEYS, "draft_pass", "max_aux_rows")
    has_distribution: ClassVar[bool] = False

    method: Literal["ptp"] | None = None  # type: ignore[assignment]
    draft_sample_method: Literal["greedy"] = "greedy"
    head: SkipValidation[PtpConfig] = None  # type: ignore[assignment]
    mask_drafts: bool = False
    draft_pass: Literal["merged", "two-pass"] = "two-pass"
    max_aux_rows: int = Field(default=256, ge=2)

    def row_groups(self, max_num_seqs: int) -> RowGroups:
        ranges, drafts = self.num_speculative_tokens_per_batch_size, self.num_speculative_tokens
        by_batch = expand_schedule(ranges, max_num_seqs, drafts)[1:]
        return plan_groups(self.head, by_batch, self.draft_pass == "two-pass", self.max_aux_rows)

    def default_schedule(self) -> Schedule:
        """Return as many drafts as the rows of each batch size give; on a GPU few lengths, each with its graphs."""
        most, groups = self.num_speculative_tokens, self.row_groups(self.max_aux_rows + 1)
        drafts = (max(sizes) + groups.leading - self.head.first_row if any(sizes) else 0 for sizes in groups.sizes)
        by_batch = [min(most, max(0, count)) for count in drafts]
        return merge_ranges(by_batch if current_platform.is_cpu() else limit_lengths(by_batch))

    @property
    def load(self) -> float:
        """Multiplications of one draft, divided by those of the target for one row: each draft is a row of it."""
        return 1.0

    def speculator(self) -> str:
        return "ptp.merged.MergedSpeculator" if self.draft_pass == "merged" else "ptp.ptp_speculator.PtpSpeculator"

    def reserved_blocks(self, vllm_config: Any, kv_cache_config: Any) -> int:
        if not kv_cache_config.kv_cache_groups:
            return 0
        longest, total = vllm_config.model_config.max_model_len, kv_cache_config.num_blocks
        block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        blocks = self.row_groups(vllm_config.scheduler_config.max_num_seqs).num_blocks(block_size)
        needed = -(-longest // block_size) + 1  # vLLM keeps one block for itself
        if total - blocks < needed:
            raise ServeConfigError(
                f"the KV cache holds {total} blocks of {block_size} tokens; {blocks} are for auxiliary rows and "
                f"{needed} for one request of {longest} tokens; raise --gpu-memory-utilization (or "
                f"--kv-cache-memory-bytes), or lower max_aux_rows={self.max_aux_rows} or --max-num-seqs"
            )
        return blocks

    @property
    def second_pass(self) -> str:
        return "method 'ptp'"

    def rows(self) -> refusals.Rows:
        return refusals.ptp_rows(self)

    def check_engine(self, vllm_config: Any) -> None:
        """Raise ServeConfigError for an engine PTP is not served with; choose attention backend and block size."""
        refusals.refuse(refusals.engine_rows(self, vllm_config))
        choose_attention(vllm_config.attention_config, self.draft_pass)
        if self.draft_pass == "merged":  # no captured graph of the target has the drafts' rows
            from vllm.config.compilation import CUDAGraphMode

            vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
        cache = vllm_config.cache_config
        if vllm_config.device_config.device_type == "cpu" and not cache.user_specified_block_size:
            cache.block_size = CPU_BLOCK_SIZE


def choose_attention(attention_config: Any, draft_pass: str) -> None:
    """Choose FLASH_ATTN where the user named no attention backend and vLLM would take FlashInfer (platforms/cuda.py).

    FlashInfer sorts a batch by length, but groups of auxiliary rows follow all of a batch's own rows. It plans each
    pass on the host, which no CUDA graph holds.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    is_blackwell = current_platform.is_cuda() and current_platform.is_device_capability_family(100)
    if attention_config.backend is None and is_blackwell:
        why = "sorts a batch by length" if draft_pass == "merged" else "runs the drafts' pass without CUDA graphs"
        logger.warning("method 'ptp': attention backend FLASH_ATTN, because FlashInfer %s", why)
        attention_config.backend = AttentionBackendEnum.FLASH_ATTN
