"""What passes with groups of auxiliary rows ask of vLLM's attention: which backends will do, and how many sequences."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from vllm_mtpc.errors import ServeConfigError
from vllm_mtpc.proposers.v2.shared_modules import changed


def builder_config(vllm_config: VllmConfig, num_seqs: int) -> VllmConfig:
    """The engine's config as the metadata builders of our passes must see it: more sequences, no graphs."""
    scheduler = changed(vllm_config.scheduler_config, max_num_seqs=num_seqs)
    compilation = changed(vllm_config.compilation_config, cudagraph_mode=CUDAGraphMode.NONE)
    return changed(vllm_config, scheduler_config=scheduler, compilation_config=compilation)


def check_attention(kv_cache_config: KVCacheConfig, groups: list[Any]) -> None:
    """Refuse attention that groups of rows cannot use; raises ServeConfigError."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if len(specs) != 1 or not isinstance(specs[0], FullAttentionSpec):
        kinds = ", ".join(sorted({type(spec).__name__ for spec in specs}))
        raise ServeConfigError(
            f"method 'ptp' on a target with layers of kind {kinds}: allowed are targets whose layers all have full "
            "attention; serve it with an MtPC head"
        )
    for group in groups:
        name = group.backend.get_name()
        if group.kernel_block_size is not None:
            raise ServeConfigError(
                f"method 'ptp': attention backend {name} splits blocks of {specs[0].block_size} tokens; allowed is a "
                f"block size of its own; add --block-size {group.kernel_block_size}"
            )
        if group.backend.forward_includes_kv_cache_update:
            raise ServeConfigError(
                f"method 'ptp': attention backend {name} writes the KV cache inside its kernel; allowed are those that "
                "write it first; add --attention-backend FLASH_ATTN"
            )
