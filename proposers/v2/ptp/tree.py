"""The student: the target's module tree once more (`shared_modules.py`), with adapters on linear layers (`GatedLinear`)
and attention layers that write keys and values in an order of their own (`GroupAttention`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import LinearBase

from vllm_mtpc.proposers.v2.lora import Gate, adapted, refuse_left
from vllm_mtpc.proposers.v2.shared_modules import copied, with_kernel


class Writes:
    """What the pass under way writes to the KV cache besides its rows' own slots."""

    num_real: int = 0  # rows of the target's own batch, at the front
    real_slots: Tensor | None = None  # [num_real] int64
    source: Tensor | None = None  # [G] blocks copied ...
    target: Tensor | None = None  # [G] ... to these


class GroupAttention(nn.Module):
    """An attention layer of the target, in a pass with groups: real rows are written, then blocks are copied, then
    every row is written and attended. Groups thus see what this very pass wrote for their requests.
    """

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


def student_tree(target: nn.Module, lora: dict[str, Tensor], scale: float, gate: Gate, writes: Writes) -> nn.Module:
    """The student of a vLLM target; raises CheckpointError where an adapter has no place in it.

    `lora`: tensors by PEFT's names, on the target's device.
    """
    left = dict(lora)
    packed = getattr(target, "packed_modules_mapping", {})

    def replace(name: str, module: nn.Module) -> nn.Module | None:
        if isinstance(module, Attention):
            return GroupAttention(module, writes)
        if isinstance(module, LinearBase):
            return adapted(name, module, left, packed, scale, gate)
        return with_kernel(module)

    student = copied(target, "", replace)
    refuse_left(left, target)
    return student
