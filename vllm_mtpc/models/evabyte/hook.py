"""What vLLM's configuration needs for EvaByte: checks, the tokenizer, how it is compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.config.compilation import CUDAGraphMode
from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.platforms import current_platform

from vllm_mtpc.errors import ServeConfigError
from vllm_mtpc.models.evabyte.config import check_config
from vllm_mtpc.models.evabyte.paged import BLOCK
from vllm_mtpc.models.limits import check_limits

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

TOKENIZER_MODE = "evabyte"


class EvaByteHook(VerifyAndUpdateConfig):
    @staticmethod
    def verify_and_update_model_config(model_config: ModelConfig) -> None:
        """Refuse variants that are not implemented; take this package's tokenizer unless another is asked for."""
        check_config(model_config.hf_config)
        if model_config.tokenizer_mode == "auto" and model_config.tokenizer == model_config.model:
            model_config.tokenizer_mode = TOKENIZER_MODE

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """Refuse what EVA's caches cannot do; compiled around the attention, decode steps in CUDA graphs, unless the
        user has none."""
        check_limits(vllm_config, "EvaByte")
        _check_caches(vllm_config)
        compilation = vllm_config.compilation_config
        if compilation.splitting_ops is None:  # one compiled piece serves all layers
            compilation.splitting_ops = ["vllm::mtpc_eva_attention"]
        if compilation.cudagraph_mode != CUDAGraphMode.NONE:
            compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY


def _check_caches(vllm_config: VllmConfig) -> None:
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    unit = BLOCK if current_platform.is_cuda() else vllm_config.model_config.hf_config.chunk_size
    if cache.user_specified_block_size and cache.block_size % unit:
        raise ServeConfigError(
            f"--block-size {cache.block_size} with EvaByte: a block holds whole chunks, and whole pages of summaries "
            f"on a GPU; allowed: multiples of {unit}; leave it out"
        )
    window = vllm_config.model_config.hf_config.window_size
    wants_groups = vllm_config.scheduler_config.disable_hybrid_kv_cache_manager is False
    if wants_groups and cache.user_specified_block_size and window % cache.block_size:
        raise ServeConfigError(
            f"--no-disable-hybrid-kv-cache-manager with --block-size {cache.block_size}: windows are freed as whole "
            f"blocks; allowed: divisors of {window}; leave the block size out"
        )
    if cache.cache_dtype not in ("auto", "float16", "bfloat16"):
        raise ServeConfigError(
            f"--kv-cache-dtype {cache.cache_dtype} with EvaByte: summaries are computed from the cache; allowed: "
            "auto; leave it out"
        )
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise ServeConfigError("context parallelism with EvaByte is not served; allowed: tensor parallelism")
    heads = vllm_config.model_config.hf_config.num_attention_heads
    if heads % parallel.tensor_parallel_size:
        raise ServeConfigError(
            f"--tensor-parallel-size {parallel.tensor_parallel_size} with EvaByte's {heads} heads; allowed: divisors "
            f"of {heads}"
        )
