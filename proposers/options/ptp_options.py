"""`speculative_config` of method ptp: its options, their checks, and the KV blocks that it reserves."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, SkipValidation
from vllm.config.utils import config
from vllm.platforms import current_platform

from vllm_mtpc.config.ptp_config import PtpConfig
from vllm_mtpc.errors import ServeConfigError
from vllm_mtpc.plan.draft_schedule import Schedule, expand_schedule, limit_lengths, merge_ranges
from vllm_mtpc.plan.row_groups import Plan, merged_plan, most_drafts, scheduled_plan, two_pass_plan
from vllm_mtpc.proposers.options.circuit_options import COMMON_KEYS, MtpcSpeculativeConfig, check_final_norm
from vllm_mtpc.proposers.options.engine_checks import check_second_pass, check_structured_outputs, how_to_v2
from vllm_mtpc.proposers.options.switches import logger

CPU_BLOCK_SIZE = 32  # the smallest of vLLM's CPU attention; each group of rows owns blocks of this size


@config
class PtpSpeculativeConfig(MtpcSpeculativeConfig):
    """vLLM's SpeculativeConfig for a PTP head.

    Attributes:
        draft_pass: whether drafts come from the target's own pass ("merged") or from a second one.
        max_aux_rows: auxiliary rows of a whole batch; larger batches draft less.
        aux_rows_per_request: the most auxiliary rows of one request (merged pass).
    """

    user_keys: ClassVar[tuple[str, ...]] = (*COMMON_KEYS, "draft_pass", "max_aux_rows", "aux_rows_per_request")
    has_distribution: ClassVar[bool] = False

    method: Literal["ptp"] | None = None  # type: ignore[assignment]
    draft_sample_method: Literal["greedy"] = "greedy"
    head: SkipValidation[PtpConfig] = None  # type: ignore[assignment]
    mask_drafts: bool = False
    draft_pass: Literal["merged", "two-pass"] = "two-pass"
    max_aux_rows: int = Field(default=256, ge=2)
    aux_rows_per_request: int | None = Field(default=None, ge=1)

    def plan(self, max_num_seqs: int) -> Plan:
        ranges, drafts = self.num_speculative_tokens_per_batch_size, self.num_speculative_tokens
        if ranges is None:
            return self._plan_for(drafts, max_num_seqs)
        by_batch = expand_schedule(ranges, max_num_seqs, drafts)[1:]
        return scheduled_plan(lambda count: self._plan_for(count, max_num_seqs), by_batch)

    def _plan_for(self, drafts: int, max_num_seqs: int) -> Plan:
        if self.draft_pass == "two-pass":
            return two_pass_plan(self.head, drafts, max_num_seqs, self.max_aux_rows)
        return merged_plan(self.head, drafts, max_num_seqs, self.max_aux_rows, self.aux_rows_per_request)

    def default_schedule(self) -> Schedule:
        """Return as many drafts as the rows of each batch size give; on a GPU few lengths, each with its graphs."""
        most, sizes = self.num_speculative_tokens, range(1, self.max_aux_rows + 2)
        plan = self._plan_for(most, sizes[-1])
        by_batch = [min(most, most_drafts(plan.bucket(size), self.head.variant, plan.leading)) for size in sizes]
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
        blocks = self.plan(vllm_config.scheduler_config.max_num_seqs).num_blocks(block_size)
        needed = -(-longest // block_size) + 1  # vLLM keeps one block for itself
        if total - blocks < needed:
            raise ServeConfigError(
                f"the KV cache holds {total} blocks of {block_size} tokens; {blocks} are for auxiliary rows and "
                f"{needed} for one request of {longest} tokens; raise --gpu-memory-utilization (or "
                f"--kv-cache-memory-bytes), or lower max_aux_rows={self.max_aux_rows} or --max-num-seqs"
            )
        return blocks

    def check_target(self) -> None:
        target, stages = self.target_model_config, self.target_parallel_config.pipeline_parallel_size
        kinds = getattr(target.hf_text_config, "layer_types", None) or ()
        is_partial = target.use_mla or target.get_sliding_window() or any(kind != "full_attention" for kind in kinds)
        subject, remedy = "speculative_config: method 'ptp'", "use an MtPC head"
        if stages > 1:
            raise ServeConfigError(
                f"{subject} with pipeline_parallel_size={stages}: allowed: 1; use tensor_parallel_size"
            )
        if is_partial:
            allowed = "allowed are targets with full attention alone"
            raise ServeConfigError(f"{subject} on {target.model}: {allowed}; {remedy}")
        if target.uses_mrope:
            raise ServeConfigError(f"{subject} on {target.model}, which has several positions per token; {remedy}")
        if self.head.late_width:  # other variants go through the target's own norm
            check_final_norm(self)

    def check_engine(self, vllm_config: Any) -> None:
        """Raise ServeConfigError for an engine PTP is not served with; choose attention backend and block size."""
        parallel, model, cache = vllm_config.parallel_config, vllm_config.model_config, vllm_config.cache_config
        check_structured_outputs(vllm_config)
        if not vllm_config.use_v2_model_runner:
            remedy = f"allowed: Model Runner V2; {how_to_v2()}, or use an MtPC head"
            raise ServeConfigError(f"method 'ptp' on Model Runner V1: {remedy}")
        others = {
            "kv_transfer_config": vllm_config.kv_transfer_config is not None,
            "watermark_config": getattr(vllm_config, "watermark_config", None) is not None,
            # engines step together there, and the second pass takes no part in it
            "data_parallel_size on a mixture of experts": parallel.data_parallel_size > 1 and model.is_moe,
            "max_model_len 'auto'": model.original_max_model_len == -1,  # fitted to blocks of which some are reserved
        }
        check_second_pass("method 'ptp' with", vllm_config, others)
        choose_attention(vllm_config.attention_config, self.draft_pass)
        if self.draft_pass == "merged":  # no captured graph of the target has the drafts' rows
            from vllm.config.compilation import CUDAGraphMode

            vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
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
