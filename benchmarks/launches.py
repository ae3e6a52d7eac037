"""Launches, bytes and FLOPs of a draft by head, vocabulary and batch, counted without a GPU.

    python -m benchmarks.launches --json benchmarks/results/launches.json

The draft (`Head.draft_params`, then `kernels.draft`, as in a CUDA graph of Model Runner V2) runs on meta tensors that
pass for CUDA tensors. A dispatch mode counts PyTorch's operations, a replacement of `JITFunction.run` the launches of
Triton kernels. Each reads its inputs and writes its outputs once, whole but for what `share` names. The ideal reads
every weight once, writes and reads once the base logits of each position, and writes the conditionals. Milliseconds are
arithmetic with the constants below, not measurements. Not counted: the gather of rows before the graph.

The layers of `PASSES` are those that are served, with one launch per kernel of vLLM. Attention is an insert and a
launch, which read and write the rows of the pass; cached keys and values are not counted. A backbone writes the context
of 1 + K rows per request, reads 1 + K queries and drafts. PTP has adapters on the layers of a target and ends with its
logits: two passes read x_1 and K auxiliary rows per request; merged is the target's pass over 1 + K rows with 2 K
auxiliary ones.

`PEERS` have the same layers, as many as their published recipes for this target or the nearest one. EAGLE-3 runs one
layer, whose input is twice as wide, for each of its 3 drafts, first over 1 + K rows per request, and multiplies by an
lm_head of 32,000 ids. DFlash and DSpark are backbones with the whole lm_head; DSpark adds, draft by draft, a bias of
rank 256. A draft is drawn in one launch, which reads the logits and writes the probabilities.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from triton.runtime.jit import JITFunction
from vllm.config import set_current_vllm_config
from vllm.config.compilation import CompilationMode
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.linear import LinearBase
from vllm.utils.torch_utils import set_default_torch_dtype

from benchmarks.draft import weight_bytes
from vllm_mtpc import demo
from vllm_mtpc.cli import guard
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.engine import provenance
from vllm_mtpc.heads.head import Head, build_head
from vllm_mtpc.kernels.draft.kernel import CircuitDrafter
from vllm_mtpc.proposers.options.draft_memory import rows_at_once
from vllm_mtpc.proposers.v2.backbone_speculator import ServedBackbone
from vllm_mtpc.proposers.v2.draft_graphs import replace_attributes
from vllm_mtpc.proposers.v2.lora import Gate, GatedLinear
from vllm_mtpc.report import check_file, print_table, write_json

DRAFTS, WIDTH, DTYPE = 7, 4096, torch.bfloat16
BYTES_PER_S, FLOPS_PER_S, LAUNCH_S = 3.35e12, 8e14, 2.5e-6  # of an H100: memory, bfloat16 products, in a CUDA graph
LM_HEAD = {"kind": "lm_head", "component_rank": 0}
LOW = LM_HEAD | {"component_rank": 16}
HEADS: dict[str, dict[str, Any]] = {
    "ff": {"circuit": "ff"},
    "cp r=8": {"circuit": "cp"},
    "btree r=8": {},
    "btree r=8 c=16": {"leaves": LOW},
    "btree r=8 c=16 t=32": {"leaves": LOW | {"token_rank": 32}},
}
BATCHES, VOCABULARIES = (1, 32, 256), (128256, 151936)
SETTINGS = {f"shared {name} V={size}": {"V": size, **own} for size in VOCABULARIES for name, own in HEADS.items()}
SETTINGS["linear btree r=32 V=320"] = {"V": 320, "leaves": {"kind": "own"}, "num_components": 32}
SETTINGS["mlp hmm r=4 t=8 V=16384"] = {  # the head of benchmarks/peers at this size
    "V": 16384, "circuit": "hmm", "num_components": 4, "trunk": {"kind": "mlp"}, "leaves": LM_HEAD | {"token_rank": 8},
}  # fmt: skip
# layers of Qwen3 8B: 5 for a backbone, and the 36 of the target
LAYERS = {"heads": 32, "kv_heads": 8, "head_dim": 128, "width": 12288}
TRUNK = {"kind": "backbone", "layers": 5, "aux_hidden_state_layer_ids": [1, 9, 17, 25, 33], **LAYERS}
BACKBONE: dict[str, Any] = {"V": 151936, "trunk": TRUNK, "leaves": LOW | {"expander_rank": 0}}
TARGET_LAYERS, LORA_RANK = 36, 16
PASSES = ("backbone btree r=8 c=16 V=151936", "PTP two passes V=151936", "PTP merged V=151936")
# the peer's layers, drafts, ids, and the rank of its bias
PEERS = {"EAGLE-3": (1, 3, 32000, 0), "DFlash": (5, DRAFTS, 151936, 0), "DSpark": (3, DRAFTS, 151936, 256)}
HEADER = ("head", "B", "operations", "Triton", "MB", "ideal MB", "of ideal", "GFLOP", "ms", "ideal ms")
NO_LAUNCH = ("aten::empty", "aten::new_empty", "aten::empty_strided", "aten::detach", "aten::_unsafe_view")


class Trace(TorchDispatchMode):
    """Counts operations, Triton launches, bytes and FLOPs of the block it is entered for."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch, self.count = batch, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = None if func.namespace == "_C" else func(*args, **(kwargs or {}))  # vLLM's kernels fill an argument
        if not func.is_view and not func.name().startswith(NO_LAUNCH):
            is_part = any(name in func.name() for name in ("gather", "index", "aten::embedding"))  # of the first one
            read = args[1:] if is_part else args
            tensors = [one for one in torch.utils._pytree.tree_leaves((read, kwargs, out)) if isinstance(one, Tensor)]
            self.count["operations"] += 1
            self.count["bytes"] += sum(one.numel() * one.element_size() for one in tensors)
            if (count := flop_registry.get(func.overloadpacket)) is not None:
                self.count["flops"] += count(*args, **(kwargs or {}), out_val=out)
        return out

    def launch(self, kernel: Any, **given: Any) -> None:
        """Count a launch of a Triton kernel."""
        self.count["triton"] += 1
        given = flatten(kernel.__name__, given)
        for name, value in given.items():
            if isinstance(value, Tensor):
                self.count["bytes"] += round(share(name, value, given, self.batch) * value.numel()) * value.itemsize
        if kernel.__name__ in ("leaf_blocks", "draft_blocks"):
            leaves = 1 if "k" in given else given["num_drafts"]
            terms = given["r"] * given["LOW"] + given["RANK"]
            self.count["flops"] += 2 * self.batch * leaves * terms * given["vocab_size"]


# Members of the arguments of a launch (`kernels/draft/launches.py`) that a kernel does not touch.
UNUSED = {
    "leaf_blocks": {"norm_ptr", "state_ptr", "record_ptr"},
    "start_rows": {"record_ptr"},
    "draft_blocks": {"top_ptr", "total_ptr"},
    "choose": {"top_ptr", "total_ptr", "norm_ptr", "evidence_ptr", "root_ptr", "seed_ptr", "allowed_ptr"},
}


def flatten(kernel: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return a kernel's arguments by name, with the members of named tuples that it uses; `Leaf.ptr` is `leaf_ptr`."""
    flat = {name: value for name, value in given.items() if not hasattr(value, "_fields")}
    for group in given.values():
        for name, value in zip(getattr(group, "_fields", ()), group if hasattr(group, "_fields") else (), strict=True):
            flat.setdefault(f"{type(group).__name__.lower()}_ptr" if name == "ptr" else name, value)
    return {name: value for name, value in flat.items() if name not in UNUSED.get(kernel, ())}


def share(name: str, tensor: Tensor, given: dict[str, Any], batch: int) -> float:
    """Return the part of a kernel's tensor that it reads or writes."""
    if name in ("source_ptr", "cache_ptr", "temperature_ptr", "seed_ptr"):  # rows of requests
        rows = min(1.0, batch / len(tensor))
        return rows / given["num_drafts"] if name == "cache_ptr" and "k" in given else rows
    is_leaf = name in ("leaf_ptr", "low_ptr", "out_ptr", "target_ptr")
    if is_leaf and "START" in given:
        return 0.0  # a number per component
    return 1 / DRAFTS if is_leaf and ("k" in given or given.get("RANK")) else 1.0  # of one draft


@contextmanager
def traced(batch: int) -> Iterator[Counter[str]]:
    """Yield the counts of the block."""
    trace = Trace(batch)

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> None:
        trace.launch(kernel, **given)

    with mock.patch.object(JITFunction, "run", run), trace:
        yield trace.count


def head_config(V: int, **options: Any) -> HeadConfig:
    """Return the config of a head for a target with V tokens."""
    given = {"circuit": "btree", "trunk": {"kind": "none"}, "leaves": LM_HEAD, "window": 1 + DRAFTS, **options}
    given.setdefault("num_components", 1 if given["circuit"] == "ff" else 8)
    return HeadConfig.create(**given, target={"vocab_size": V, "hidden_size": WIDTH}, verifier="-")


def make_head(config: HeadConfig) -> Head:
    """Return a head of meta tensors, whose lm_head is one product."""
    with torch.device("meta"), set_default_torch_dtype(DTYPE):
        head = build_head(config).requires_grad_(False)
        if head.leaves.needs_lm_head:
            lm_head = torch.empty(config.vocab_size, WIDTH, dtype=DTYPE)
            head.leaves.bind_lm_head(
                lambda states: F.linear(states.flatten(0, 2), lm_head).unflatten(0, states.shape[:3])
            )
        if head.trunk.needs_embedding:
            head.trunk.bind_embedding(lambda tokens: F.embedding(tokens, lm_head))
    return head


def make_draft(head: Head, batch: int) -> Callable[[], None]:
    """Return the draft of a batch from states, in the chunks that the speculator makes."""
    size = head.vocab_size
    drafter = CircuitDrafter(head.circuit.program, head.circuit.num_components, size, torch.device("cpu"), None)
    in_blocks = not drafter.one_launch
    step = rows_at_once(head, [0] + [DRAFTS] * batch, DRAFTS, DTYPE, in_blocks=in_blocks)[DRAFTS]

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    shape = (batch, head.trunk.num_queries, WIDTH) if head.trunk.is_per_position else (batch, WIDTH)
    hidden, first, slots, seeds, pos = empty(*shape, dtype=DTYPE), *(empty(batch) for _ in range(4))
    tokens, confidences = empty(batch, DRAFTS), empty(batch, DRAFTS, dtype=torch.float32)
    temperature, cache = empty(batch, dtype=torch.float32), empty(batch, DRAFTS, size, dtype=DTYPE)

    def draft() -> None:
        for start in range(0, batch, step):
            rows = slice(start, start + step)
            drafter(
                *head.draft_params(hidden[rows], first[rows], DRAFTS, in_blocks), slots=slots[rows],
                temperature=temperature, seeds=seeds, pos=pos[rows], tokens=tokens[rows],
                confidences=confidences[rows], cache=cache,
            )  # fmt: skip

    return draft


def serve_layers(config: HeadConfig, head: Head, own: Counter[str]) -> ServedBackbone:
    """Return the served layers of a backbone, of meta tensors.

    own: counts of kernels that do not run on meta tensors, of caches, attention and activations.
    """
    made = EngineArgs(str(demo.path("target")), max_model_len=64, kv_cache_memory_bytes=1 << 26).create_engine_config()
    eager = replace_attributes(made.compilation_config, mode=CompilationMode.NONE, custom_ops=["all"])
    made = replace_attributes(made, compilation_config=eager)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(parallel_state, "_TP", SimpleNamespace(world_size=1, rank_in_group=0)))
        for context in (set_current_vllm_config(made), torch.device("meta"), set_default_torch_dtype(DTYPE)):
            stack.enter_context(context)
        served = ServedBackbone(config, made).requires_grad_(False)
        served.load_weights(head.trunk.backbone.state_dict())

    def touch(*tensors: Tensor) -> None:
        own["operations"] += 1
        own["bytes"] += sum(tensor.nbytes for tensor in tensors)

    def insert(attn: Any, keys: Tensor, values: Tensor, *rest: Any) -> None:
        touch(keys, values, keys, values)  # read and written

    def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        insert(None, keys, values)
        touch(queries, queries)
        return torch.empty_like(queries)

    def activate(gates: Tensor) -> Tensor:
        half = torch.empty_like(gates.chunk(2, dim=-1)[0])
        touch(gates, half)
        return half

    for layer in served.layers:
        layer.self_attn.attn.forward, layer.mlp.act_fn.forward = attend, activate
        layer.self_attn.attn.impl = SimpleNamespace(do_kv_cache_update=insert)
    for module in served.modules():
        if isinstance(module, LinearBase):
            module.cpu_linear = F.linear  # in the place of vLLM's packed products on a CPU
    return served


def adapt_layers(layers: nn.ModuleList, gate: Gate) -> None:
    """Give every linear layer adapters on the rows of `gate`."""
    for parent in (part for layer in layers for part in (layer.self_attn, layer.mlp)):
        for name, base in list(parent.named_children()):
            if isinstance(base, LinearBase):
                sizes = getattr(base, "output_sizes", None) or [base.output_size]
                with torch.device("meta"), set_default_torch_dtype(DTYPE):
                    parts = [(torch.empty(LORA_RANK, base.input_size), torch.empty(size, LORA_RANK)) for size in sizes]
                setattr(parent, name, GatedLinear(base, parts, 1.0, gate))


def measure_pass(name: str, batch: int) -> dict[str, Any]:
    """Count a backbone head or PTP at one batch size."""
    is_backbone, own, gate = name.startswith("backbone"), Counter[str](), Gate()
    config = head_config(**BACKBONE)
    head, rows = make_head(config), batch * (1 + DRAFTS)
    served, draft = serve_layers(config, head, own), make_draft(head, batch)
    if not is_backbone:
        adapt_layers(served.layers, gate)
        served.layers = nn.ModuleList([served.layers[0]] * TARGET_LAYERS)
        gate.choose(0, batch, 1 + DRAFTS, lead=1)
    if name.startswith("PTP merged"):
        gate.choose(rows, 1, 2 * batch * DRAFTS)
        rows += 2 * batch * DRAFTS

    def empty(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    positions, first = empty(rows, dtype=torch.int64), empty(batch, dtype=torch.int64)
    with torch.no_grad(), mock.patch.object(torch.Tensor, "is_cuda", True), traced(batch) as count:
        if is_backbone:
            aux = torch.cat([empty(rows, WIDTH) for _ in config.trunk.aux_hidden_state_layer_ids], dim=-1)
            served.write_context(aux, positions, [positions] * len(served.layers))
            served(positions, head.trunk.queries(first).flatten(0, 1))
            draft()
        else:
            served(positions, empty(rows, WIDTH))
            F.linear(empty(batch * DRAFTS, WIDTH), empty(config.vocab_size, WIDTH))
    count.update(own)
    parts = [served] if is_backbone else served.layers
    weights = sum(tensor.numel() for part in parts for tensor in chain(part.parameters(), part.buffers()))
    logits, lm_head = batch * DRAFTS * config.vocab_size, config.vocab_size * WIDTH
    ideal = DTYPE.itemsize * (weights + lm_head + (3 if is_backbone else 2) * logits)
    return figures(name, batch, count, ideal, 2 * (rows * weights + logits * WIDTH))


def measure_peer(name: str, batch: int) -> dict[str, Any]:
    """Count the draft of a peer at one batch size."""
    layers, drafts, ids, rank = PEERS[name]
    recurs, own = name == "EAGLE-3", Counter[str]()
    aux = TRUNK["aux_hidden_state_layer_ids"][: 3 if recurs else None]
    trunk = TRUNK | {"layers": layers, "aux_hidden_state_layer_ids": aux}
    config = head_config(**BACKBONE | {"trunk": trunk, "window": 1 + drafts})
    served, rows = serve_layers(config, make_head(config), own), batch * (1 + drafts)

    def empty(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    lm_head, bias, bias_in = empty(ids, WIDTH), empty(ids, rank), empty(ids, rank)
    second_half = empty(served.layers[0].self_attn.qkv_proj.output_size, WIDTH)  # of EAGLE-3's wider input

    def draw(logits: Tensor) -> None:
        own["operations"] += 1
        own["bytes"] += 2 * logits.nbytes

    def positions(count: int) -> Tensor:
        return empty(count, dtype=torch.int64)

    with torch.no_grad(), mock.patch.object(torch.Tensor, "is_cuda", True), traced(batch) as count:
        read_states = torch.cat([empty(rows, WIDTH) for _ in aux], dim=-1)
        if recurs:
            states = torch.mm(read_states, served.fc.weight.T)
            for size in [rows] + [batch] * (drafts - 1):
                F.embedding(positions(size), empty(151936, WIDTH))
                F.linear(empty(size, WIDTH), second_half)
                served(positions(size), states[:size])
                draw(F.linear(states[:batch], lm_head))
        else:
            served.write_context(read_states, positions(rows), [positions(rows)] * layers)
            logits = F.linear(served(positions(rows), empty(rows, WIDTH))[: batch * drafts], lm_head)
            for _ in range(drafts if rank else 0):
                draw(F.linear(F.embedding(positions(batch), bias_in), bias).add_(logits[:batch]))
            if not rank:
                draw(logits)
    count.update(own)
    context = () if recurs else served.buffers()
    weights = sum(tensor.numel() for tensor in chain(served.parameters(), context))
    if recurs:
        read = drafts * (weights - served.fc.weight.numel() + second_half.numel() + lm_head.numel())
        read += served.fc.weight.numel()
    else:
        read = weights + lm_head.numel() + drafts * bias.numel()
    logits_bytes = 3 * batch * drafts * ids
    return figures(name, batch, count, DTYPE.itemsize * (read + logits_bytes), count["flops"])


def measure(name: str, batch: int) -> dict[str, Any]:
    """Count one head, pass or peer at one batch size."""
    if name in PEERS:
        return measure_peer(name, batch)
    if name in PASSES:
        return measure_pass(name, batch)
    head = make_head(head_config(**SETTINGS[name]))
    draft = make_draft(head, batch)
    with torch.no_grad(), mock.patch.object(torch.Tensor, "is_cuda", True), traced(batch) as count:
        draft()
    r, positions = head.circuit.num_components, DRAFTS + (head.circuit.num_components > 1)
    leaves = r if head.leaves.component_rank == 0 else 1
    products = 2 * batch * positions * leaves * head.vocab_size * WIDTH
    logits = batch * positions * leaves * head.vocab_size * DTYPE.itemsize
    conditionals = batch * DRAFTS * head.vocab_size * DTYPE.itemsize
    ideal = weight_bytes(head, DRAFTS) + 2 * logits + conditionals
    return figures(name, batch, count, ideal, products)


def figures(name: str, batch: int, count: Counter[str], ideal: int, products: int) -> dict[str, Any]:
    """Return a row of the table; ideal, products: least bytes and FLOPs."""
    launches = count["operations"] + count["triton"]
    ms = 1e3 * (max(count["bytes"] / BYTES_PER_S, count["flops"] / FLOPS_PER_S) + LAUNCH_S * launches)
    best = 1e3 * max(ideal / BYTES_PER_S, products / FLOPS_PER_S)
    return {
        "head": name, "batch": batch, "operations": count["operations"], "triton": count["triton"],
        "bytes": count["bytes"], "ideal_bytes": ideal, "flops": count["flops"],
        "ms": round(ms, 3), "ideal_ms": round(best, 3),
    }  # fmt: skip


def line(row: dict[str, Any]) -> list[str]:
    """Format a row of the table."""
    ratio = f"{row['bytes'] / row['ideal_bytes']:.2f}x"
    sizes = [f"{row['bytes'] / 1e6:,.0f}", f"{row['ideal_bytes'] / 1e6:,.0f}", ratio, f"{row['flops'] / 1e9:,.1f}"]
    counts = [str(row[key]) for key in ("head", "batch", "operations", "triton")]
    return [*counts, *sizes, f"{row['ms']:.3f}", f"{row['ideal_ms']:.3f}"]


def run(args: argparse.Namespace) -> int:
    """Count every head; print a table and write JSON."""
    check_file(args.json)
    rows = [measure(name, batch) for name in (*SETTINGS, *PASSES, *PEERS) for batch in BATCHES]
    print_table(f"a draft of K={DRAFTS}, D={WIDTH}, bfloat16; ms by arithmetic", HEADER, [line(row) for row in rows])
    if args.json:
        write_json(args.json, {"kind": "launches", **provenance.collect(), "drafts": DRAFTS, "rows": rows})
    return 0


def main(words: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.launches", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    return guard(parser.prog, lambda: run(parser.parse_args(words)))


if __name__ == "__main__":
    sys.exit(main())
