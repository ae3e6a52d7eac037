"""Copies of the target's modules with LoRA on selected rows, on top of vLLM's own linear layers, sharded as they are.

    y = W x                                  every row, by the target's own layer, quantised or not
    y[aux] += alpha / r * B A x[aux]         PTP's auxiliary rows, added in place; draft layers: every row

Rows of real tokens stay bit for bit those of the target. The auxiliary rows are a view of x (`Gate`), so a layer takes
two products more. For layers that vLLM merges (q, k, v; gate, up) the parts' A are stacked and B is block-diagonal.
Under tensor parallelism B is sharded as a split output is; for a split input A is sharded as the input is, and the r
products are summed over ranks before B.

Where vLLM compiles a target, its CustomOps (norms, activations, rotary positions) run their PyTorch definitions, which
inductor fuses. Copies run eagerly, so they run the device's kernels.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.linear import ColumnParallelLinear, LinearBase, QKVParallelLinear, RowParallelLinear

from vllm_mtpc.errors import CheckpointError

PREFIX = "base_model.model."  # PEFT's, before the names of the target's modules
Replace = Callable[[str, nn.Module], nn.Module | None]  # (name, module) -> another module, or None
Copy = Callable[[str, nn.Module, Replace], nn.Module | None]


class Gate:
    """The rows of a pass that are adapted: all (draft layers), or those that `choose` names."""

    start: int = 0
    groups: int = 1
    width: int | None = None  # None: every row of the pass
    lead: int = 0

    def choose(self, start: int, groups: int, width: int, lead: int = 0) -> None:
        """Adapt, from row `start`, `groups` times `width` rows without the first `lead` of each group."""
        self.start, self.groups, self.width, self.lead = start, groups, width, lead

    def view(self, rows: Tensor) -> Tensor:
        """Return the adapted rows [groups, width - lead, D] of [T, D], without a copy."""
        if self.width is None:
            return rows[None]
        stop = self.start + self.groups * self.width
        return rows[self.start : stop].view(self.groups, self.width, -1)[:, self.lead :]


class GatedLinear(nn.Module):
    """A vLLM linear layer with adapters on the rows of `gate`; parts: (A [r, in], B [out part, r]) of this rank."""

    def __init__(self, base: LinearBase, parts: Sequence[tuple[Tensor, Tensor]], scale: float, gate: Gate) -> None:
        super().__init__()
        self.base, self.gate = base, gate
        self.is_split_input = isinstance(base, RowParallelLinear) and base.tp_size > 1
        # buffers: vLLM keeps them over a sleep of level 2
        self.register_buffer("down", torch.cat([down for down, _ in parts]), persistent=False)  # [parts * r, in]
        self.register_buffer("up", torch.block_diag(*(up * scale for _, up in parts)), persistent=False)

    def forward(self, x: Tensor) -> Any:
        result = self.base(x)
        out = result[0] if isinstance(result, tuple) else result
        rows = self.gate.view(x)  # [G, A, in]
        low = torch.bmm(rows, self.down.T.expand(len(rows), -1, -1))  # [G, A, parts * r]
        if self.is_split_input:
            low = tensor_model_parallel_all_reduce(low)
        self.gate.view(out).baddbmm_(low, self.up.T.expand(len(rows), -1, -1))
        return result


def adapt_linear(
    name: str, base: LinearBase, lora: dict[str, Tensor], packed: Mapping[str, Sequence[str]], scale: float, gate: Gate
) -> nn.Module:
    """Return `base` with its adapters, or `base` itself if it has none.

    Args:
        lora, packed: tensors by PEFT's names, less those used here; parts by the name of the layer that merges them.

    Raises:
        CheckpointError: a merged layer has adapters for some of its parts only, or vLLM's layer cannot be adapted.
    """
    parent, _, last = name.rpartition(".")
    names = [f"{parent}.{part}" for part in packed.get(last, (last,))]  # on disk: q_proj, k_proj, v_proj of qkv_proj
    found = [part for part in names if f"{PREFIX}{part}.lora_A.weight" in lora]
    if not found:
        return base
    if found != names:
        merged = f"vLLM computes {', '.join(names)} as one; use a head that adapts all of them"
        raise CheckpointError(f"the head adapts {', '.join(found)}, but {merged}")
    if isinstance(base, RowParallelLinear) and not base.reduce_results and base.tp_size > 1:
        raise CheckpointError(f"{name}: vLLM adds up its ranks elsewhere, so it cannot be adapted; use one rank")
    parts = []
    for part, rows in zip(names, _output_shards(base, len(names)), strict=True):
        down, up = (lora.pop(f"{PREFIX}{part}.lora_{letter}.weight") for letter in "AB")
        if isinstance(base, RowParallelLinear):  # A is sharded as the input
            width = base.input_size_per_partition
            down = down[:, base.tp_rank * width : (base.tp_rank + 1) * width].contiguous()
        if rows.stop is not None and rows.stop > up.shape[0]:
            raise CheckpointError(f"{part}: the adapter has {up.shape[0]} outputs, too few; use a head of this target")
        parts.append((down, up[rows].contiguous()))
    return GatedLinear(base, parts, scale, gate)


def _output_shards(base: LinearBase, num_parts: int) -> list[slice]:
    if not isinstance(base, ColumnParallelLinear):
        return [slice(None)] * num_parts
    if isinstance(base, QKVParallelLinear):
        num_kv, kv_rank = base.num_kv_heads, base.tp_rank // base.num_kv_head_replicas  # ranks share one of too few
        sizes = [base.num_heads * base.head_size, num_kv * base.head_size, num_kv * base.v_head_size]
        ranks = [base.tp_rank, kv_rank, kv_rank]
    else:
        sizes = [size // base.tp_size for size in getattr(base, "output_sizes", None) or [base.output_size]]
        ranks = [base.tp_rank] * len(sizes)
    if len(sizes) != num_parts:
        raise CheckpointError(f"{type(base).__name__} has {len(sizes)} parts, {num_parts} are named; not supported")
    return [slice(rank * size, (rank + 1) * size) for rank, size in zip(ranks, sizes, strict=True)]


def copy_adapted(
    target: nn.Module,
    modules: Mapping[str, nn.Module],
    lora: Mapping[str, Tensor],
    scale: float,
    gate: Gate,
    copy_: Copy,
) -> list[nn.Module]:
    """Copy modules of vLLM's target, by name, with adapters on their linear layers.

    copy_: called for layers with (name, layer, function that copies its children); returns the copy, else None.
    """
    left, packed = dict(lora), getattr(target, "packed_modules_mapping", {})

    def replace(name: str, module: nn.Module) -> nn.Module | None:
        if isinstance(module, LinearBase):
            return adapt_linear(name, module, left, packed, scale, gate)
        twin = copy_(name, module, replace)
        return copy_with_kernel(module) if twin is None else twin

    copies = [copy_modules(module, name, replace) for name, module in modules.items()]
    if left:
        absent = f"{sorted(left)[0]}, which {type(target).__name__} of vLLM does not have ({len(left)} such tensors)"
        raise CheckpointError(f"the head adapts {absent}; use a head of this target")
    return copies


def copy_modules(module: nn.Module, name: str, replace: Replace) -> nn.Module:
    """Copy a container with its children, which share what `replace` does not copy."""
    other = replace(name, module)
    if other is not None:
        return other
    if not module._modules:
        return module
    twin = copy.copy(module)
    twin.__dict__["_modules"] = {
        key: child if child is None else copy_modules(child, f"{name}.{key}" if name else key, replace)
        for key, child in module._modules.items()
    }
    return twin


def copy_with_kernel(module: nn.Module) -> nn.Module | None:
    """Copy a CustomOp so that it runs the device's kernel; None for other modules and one of layers with weights."""
    if not isinstance(module, CustomOp) or any(any(True for _ in child.parameters()) for child in module.children()):
        return None
    twin = copy.copy(module)
    twin._enforce_enable = True
    twin._forward_method = twin.dispatch_forward(compile_native=False)
    return twin
