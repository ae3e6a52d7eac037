"""The PTP student: a copy of the target's module tree with adapters and with attention over groups of rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import LinearBase
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from vllm_mtpc.errors import ServeConfigError
from vllm_mtpc.proposers.v2.lora import Gate, adapt_linear, check_no_adapter_left
from vllm_mtpc.proposers.v2.shared_modules import copy_modules, copy_with_kernel


class Writes:
    """The KV cache writes of a pass, besides those to its rows' own slots."""

    num_real: int = 0  # rows of the target's own batch, at the front
    real_slots: Tensor | None = None  # [num_real], int64
    source: Tensor | None = None  # [G], blocks that are copied ...
    target: Tensor | None = None  # [G], ... to these


class GroupAttention(nn.Module):
    """An attention layer of the target: real rows are written, then blocks copied, then every row written and read."""

    def __init__(self, layer: Attention, writes: Writes) -> None:
        super().__init__()
        self.layer, self.writes = layer, writes

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        layer, writes = self.layer, self.writes
        cache = layer.kv_cache
        if writes.source is not None and cache.numel():
            if writes.num_real:
                rows = slice(writes.num_real)
                layer.impl.do_kv_cache_update(
                    layer,
                    key[rows].view(-1, layer.num_kv_heads, layer.head_size),
                    value[rows].view(-1, layer.num_kv_heads, layer.head_size_v),
                    cache,
                    writes.real_slots,
                )
            blocks = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache  # float8 cannot be indexed
            blocks[writes.target] = blocks[writes.source]
        return layer(query, key, value, *args, **kwargs)


def build_student(target: nn.Module, lora: dict[str, Tensor], scale: float, gate: Gate, writes: Writes) -> nn.Module:
    """Build the student of a vLLM target; CheckpointError: an adapter has no layer in the target."""
    left = dict(lora)
    packed = getattr(target, "packed_modules_mapping", {})

    def replace(name: str, module: nn.Module) -> nn.Module | None:
        if isinstance(module, Attention):
            return GroupAttention(module, writes)
        if isinstance(module, LinearBase):
            return adapt_linear(name, module, left, packed, scale, gate)
        return copy_with_kernel(module)

    student = copy_modules(target, "", replace)
    check_no_adapter_left(left, target)
    return student


def check_attention(kv_cache_config: KVCacheConfig, attn_groups: list[list[Any]]) -> None:
    """Raise ServeConfigError for several KV cache groups, and for a backend whose cache groups cannot use."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if len(specs) != 1 or not isinstance(specs[0], FullAttentionSpec):
        kinds = ", ".join(sorted({type(spec).__name__ for spec in specs}))
        raise ServeConfigError(
            f"method 'ptp' on a target with layers of kind {kinds}: allowed are targets whose layers all have full "
            "attention; serve it with an MtPC head"
        )
    for group in attn_groups[0]:
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
