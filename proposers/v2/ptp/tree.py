"""The student: the target's module tree once more, around the same weights and the same attention layers.

Containers are copied; everything that holds weights is shared, so the student costs its adapters and nothing else.
Three kinds of modules differ: linear layers that have adapters (`GatedLinear`), attention layers, whose copy writes
keys and values in an order of its own (`GroupAttention`), and what runs as a kernel here and is compiled there
(`eager.py`). The target's tree is not changed and stays compiled.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import LinearBase

from vllm_mtpc.errors import CheckpointError
from vllm_mtpc.proposers.v2.eager import with_kernel
from vllm_mtpc.proposers.v2.lora import Gate, adapted


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
    if left:
        raise CheckpointError(
            f"the head adapts {sorted(left)[0]}, which {type(target).__name__} of vLLM does not have "
            f"({len(left)} such tensors); use a head of this target"
        )
    return student


def copied(module: nn.Module, name: str, replace: Callable[[str, nn.Module], nn.Module | None]) -> nn.Module:
    """A copy of a container with its children copied or replaced; a module without children is shared."""
    other = replace(name, module)
    if other is not None:
        return other
    if not module._modules:
        return module
    twin = copy.copy(module)
    children = {
        key: child if child is None else copied(child, f"{name}.{key}" if name else key, replace)
        for key, child in module._modules.items()
    }
    twin.__dict__["_modules"] = children
    return twin
