"""Hooks of vLLM's configuration for byte-level targets: refused options, and the compilation of EvaByte."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.config.compilation import CUDAGraphMode
from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.platforms import current_platform

from vllm_mtpc.errors import ServeConfigError
from vllm_mtpc.models.byte_llama.config import check_byte_llama
from vllm_mtpc.models.evabyte.config import GPU_BLOCK, check_evabyte

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


class ByteLlamaHook(VerifyAndUpdateConfig):
    @staticmethod
    def verify_and_update_model_config(model_config: ModelConfig) -> None:
        check_byte_llama(model_config.hf_config)

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        check_limits(vllm_config, "a byte-level Llama")
        if vllm_config.model_config.enable_prompt_embeds:
            raise ServeConfigError(
                "--enable-prompt-embeds with a byte-level Llama: an embedding needs the ids before it; leave it out"
            )


class EvaByteHook(VerifyAndUpdateConfig):
    @staticmethod
    def verify_and_update_model_config(model_config: ModelConfig) -> None:
        check_evabyte(model_config.hf_config)

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """Check options of EVA's caches; compile around the attention, with CUDA graphs of decode steps if any."""
        check_limits(vllm_config, "EvaByte")
        _check_caches(vllm_config)
        compilation = vllm_config.compilation_config
        if compilation.splitting_ops is None:  # one compiled piece serves all layers
            compilation.splitting_ops = ["vllm::mtpc_eva_attention"]
        if compilation.cudagraph_mode != CUDAGraphMode.NONE:
            compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY


def check_limits(vllm_config: VllmConfig, model: str) -> None:
    """Raise ServeConfigError for pipeline parallelism and for PTP heads, whose rows are no tokens."""
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages > 1:
        raise ServeConfigError(
            f"--pipeline-parallel-size {stages} with {model} is not served; allowed: 1; use tensor parallelism"
        )
    if getattr(vllm_config.speculative_config, "method", None) == "ptp":
        raise ServeConfigError(
            f"speculative_config: method 'ptp' with {model} is not served; allowed: 'mtpc'; use an MtPC head"
        )


def _check_caches(vllm_config: VllmConfig) -> None:
    cache, parallel, config = vllm_config.cache_config, vllm_config.parallel_config, vllm_config.model_config.hf_config
    block = cache.block_size if cache.user_specified_block_size else 0
    unit = GPU_BLOCK if current_platform.is_cuda() else config.chunk_size
    frees_windows = vllm_config.scheduler_config.disable_hybrid_kv_cache_manager is False
    if block % unit:
        raise ServeConfigError(
            f"--block-size {block} with EvaByte: a block holds whole chunks, and whole pages of summaries on a GPU; "
            f"allowed: multiples of {unit}; leave it out"
        )
    if frees_windows and block and config.window_size % block:
        raise ServeConfigError(
            f"--no-disable-hybrid-kv-cache-manager with --block-size {block}: windows are freed as whole blocks; "
            f"allowed: divisors of {config.window_size}; leave the block size out"
        )
    if cache.cache_dtype not in ("auto", "float16", "bfloat16"):
        raise ServeConfigError(
            f"--kv-cache-dtype {cache.cache_dtype} with EvaByte: summaries are computed from the cache; allowed: "
            "auto; leave it out"
        )
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise ServeConfigError("context parallelism with EvaByte is not served; allowed: tensor parallelism")
