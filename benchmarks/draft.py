"""Cost of a draft by head and batch: ``python -m benchmarks.draft --head HEAD... --json FILE``.

Times the head alone, without an engine: its parameters (`draft_params`) and the tokens drawn from the circuit
(`kernels.draft`: the kernel on a GPU, its definition in PyTorch on a CPU). `vllm-mtpc bench serve` measures the rest.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from benchmarks import timing
from vllm_mtpc.checkpoint import load_head
from vllm_mtpc.circuits import CIRCUITS, circuit_class
from vllm_mtpc.cli import guard
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.engine import provenance
from vllm_mtpc.errors import UsageError
from vllm_mtpc.eval.evaluator import resolve
from vllm_mtpc.heads import default_leaves
from vllm_mtpc.heads.head import DraftParams, Head, build_head
from vllm_mtpc.hf import choose_device
from vllm_mtpc.kernels.draft import is_small, probabilities
from vllm_mtpc.kernels.filter.program import Program
from vllm_mtpc.kernels.pick.naive import of_mass
from vllm_mtpc.report import check_file, print_table, write_json

PROG = "python -m benchmarks.draft"
BYTES = 320  # vocabulary of EvaByte
DEFINITIONS = (
    "params ms: the head's products for one draft of K tokens per request; tokens ms: K tokens from the circuit; draft "
    "ms: both. Medians.",
    "captured ms: both as one CUDA graph; launches: kernels, copies and fills of a draft that is not captured.",
    "MiB: weights that a draft reads at any batch size; floor ms: these bytes at the bandwidth of a large copy.",
    "of a step: draft ms (captured where it was) divided by a step of the target without its draft.",
)
HEADER = ("head", "K", "batch", "T", "params ms", "tokens ms", "draft ms", "captured ms", "launches", "MiB", "floor ms",
          "of a step")  # fmt: skip


class Case(NamedTuple):
    """A head to time."""

    name: str
    head: Head
    num_drafts: int


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--head", nargs="+", default=[], metavar="HEAD", help="MtPC heads without own layers: folders or hub names")
    add("--shape", nargs="+", type=shape, default=[], metavar="D=..,V=..,n=..,r=..", help="random heads; c: rank")
    add("--circuits", nargs="+", choices=CIRCUITS, default=list(CIRCUITS), help="of --shape (default: all)")
    add("--batch", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64], metavar="B")
    add("--temperature", type=float, nargs="+", default=[1.0], metavar="T")
    add("--curves", type=Path, metavar="FILE", help="steps of the target, of `python -m benchmarks.gpu.steps`")
    add("--repeats", type=int, default=50, metavar="N", help="timed calls (default: 50)")
    add("--json", type=Path, metavar="FILE")
    return parser


def shape(text: str) -> dict[str, int]:
    """Read `D=4096,V=320,n=8,r=32`; c=16 adds component_rank."""
    try:
        sizes = {"c": 0} | {key: int(value) for key, value in (word.split("=") for word in text.split(","))}
        if set(sizes) != set("DVnrc"):
            raise ValueError
        return sizes
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected is D=4096,V=320,n=8,r=32, then c=16") from None


def main(words: list[str] | None = None) -> int:
    """Run the command."""
    args = parser().parse_args(words)
    return guard(PROG, lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """Time every case at every batch size; print a table and write JSON."""
    if not args.head and not args.shape:
        raise UsageError("nothing to time: name heads (--head) or sizes (--shape D=4096,V=320,n=8,r=32)")
    check_file(args.json)
    device = choose_device("auto")
    # as the proposers choose it
    has_bfloat16 = device.type == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    dtype = torch.bfloat16 if has_bfloat16 else torch.float32
    curves = json.loads(args.curves.read_text(encoding="utf-8"))["step_ms"] if args.curves else []
    step_ms = {rows: ms for *_, rows, ms in curves}  # by rows that the target verifies
    bandwidth, rows = timing.bytes_per_second(device), []
    with torch.inference_mode(), tqdm(unit="cell", disable=None) as bar:
        for case in cases(args, dtype, device):
            for batch, temperature in itertools.product(args.batch, args.temperature):
                ms = step_ms.get(batch * (1 + case.num_drafts))
                rows.append(time_case(case, batch, temperature, args.repeats, bandwidth, ms))
                bar.update()
    how = {"device": str(device), "dtype": str(dtype).removeprefix("torch."), "threads": torch.get_num_threads(),
           "gigabytes_per_second": round(bandwidth / 1e9, 1)}  # fmt: skip
    print_table(f"draft on {device}, {how['dtype']}, {how['threads']} CPU threads", HEADER, [line(row) for row in rows])
    print("\n".join(("", *DEFINITIONS)))
    if args.json:
        values = {"kind": "draft", **provenance.collect(), "definitions": DEFINITIONS, "how": how, "rows": rows}
        write_json(args.json, values)
    return 0


def cases(args: argparse.Namespace, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """Yield the heads one by one, so that one is in memory at a time."""
    for name in args.head:
        config, head = load_head(resolve(name)[0], dtype, device)
        if config.has_draft_layers:
            raise UsageError(f"{name}: has layers of its own, which run in an engine; type: vllm-mtpc bench serve")
        parts = f"{config.trunk.kind} {config.leaves.kind}"
        label = f"{config.circuit.kind} n={config.window} r={config.num_components} {parts}"
        yield bound(Case(label, head, config.num_speculative_tokens))
    for sizes, circuit in ((sizes, circuit) for sizes in args.shape for circuit in args.circuits):
        r = min(sizes["r"], circuit_class(circuit).max_components)
        rank = sizes["c"] if r > 1 else 0
        leaves = {"kind": default_leaves(sizes["V"])}
        if leaves["kind"] == "lm_head":
            leaves["component_rank"] = rank
        given = {"circuit": circuit, "window": sizes["n"], "num_components": r}
        given |= {"trunk": {"kind": "none"}, "leaves": leaves}
        target = {"vocab_size": sizes["V"], "hidden_size": sizes["D"]}
        config = HeadConfig.create(**given, target=target, verifier="-")
        torch.manual_seed(0)
        with torch.device(device):
            head = build_head(config).to(dtype).eval()
        name = f"{circuit} n={sizes['n']} r={r}" + f" c={rank}" * bool(rank) + f" D={sizes['D']} V={sizes['V']}"
        yield bound(Case(f"{name} (random)", head, config.window - 1))


def bound(case: Case) -> Case:
    """Bind a random lm_head, and its rows as embeddings, where the head reads the target's."""
    head = case.head
    if head.leaves.needs_lm_head or head.trunk.needs_embedding:
        weight = next(head.parameters())
        lm_head = torch.randn(head.columns, head.hidden_size, dtype=weight.dtype, device=weight.device)
        if head.leaves.needs_lm_head:
            # as one matrix, as in serving: a view of several dimensions becomes many small products
            head.leaves.bind_lm_head(lambda x: F.linear(x.flatten(0, -2), lm_head).view(*x.shape[:-1], -1))
        head.trunk.bind_embedding(lambda tokens: F.embedding(tokens % head.columns, lm_head))
    return case


def time_case(
    case: Case, batch: int, temperature: float, repeats: int, bandwidth: float, step_ms: float | None
) -> dict[str, Any]:
    """Time one head at one batch size."""
    device = next(case.head.parameters()).device
    params, tokens, draft = parts(case, batch, temperature)
    calls = {"params_ms": params, "tokens_ms": tokens, "draft_ms": draft}
    times: dict[str, Any] = {name: timing.measure(call, device, repeats) for name, call in calls.items()}
    on_gpu, moved = device.type == "cuda", weight_bytes(case.head, case.num_drafts)
    times["captured_ms"] = timing.measure(timing.capture(draft), device, repeats) if on_gpu else None
    served_ms = (times["captured_ms"] or times["draft_ms"]).median
    return {
        "head": case.name,
        "drafts": case.num_drafts,
        "batch": batch,
        "temperature": temperature,
        **times,
        "launches": timing.count_launches(draft) if on_gpu else None,
        "weight_bytes": moved,
        "floor_ms": round(1000 * moved / bandwidth, 5),
        "step_ms": step_ms,
        "share": step_ms and round(served_ms / step_ms, 5),
    }


def line(row: dict[str, Any]) -> list[str]:
    """Format a row of the table."""
    times = [row[name] for name in ("params_ms", "tokens_ms", "draft_ms", "captured_ms")]
    shown = [f"{ms[0]:.3f}" if ms else "-" for ms in times]
    share = "-" if row["share"] is None else f"{row['share']:.1%}"
    sizes = [str(row["launches"] or "-"), f"{row['weight_bytes'] / 2**20:.2f}", f"{row['floor_ms']:.3f}"]
    return [row["head"], str(row["drafts"]), str(row["batch"]), f"{row['temperature']:g}", *shown, *sizes, share]


def parts(case: Case, batch: int, temperature: float) -> tuple[Callable[[], Any], ...]:
    """Return the calls to time: parameters; tokens [B, K] of given parameters; both."""
    head, num_drafts = case.head, case.num_drafts
    weight = next(head.parameters())
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(batch, head.hidden_size, generator=generator).to(weight.device, weight.dtype)
    first = torch.randint(0, head.vocab_size, (batch,), generator=generator).to(weight.device)
    if weight.device.type == "cuda":
        leaf = (batch, num_drafts, head.circuit.num_components, head.vocab_size)
        draw = draft_kernel(head.circuit.program, leaf, temperature, weight.device)
    else:
        draw = partial(draw_by_definition, head, temperature)

    in_blocks = weight.device.type == "cuda" and not is_small(head.circuit.num_components, head.vocab_size)

    def params() -> DraftParams:
        return head.draft_params(hidden, first, num_drafts, in_blocks)

    return params, partial(draw, params()), lambda: draw(params())


def draw_by_definition(head: Head, temperature: float, given: DraftParams) -> Tensor:
    """Draw tokens [B, K] as Model Runner V1 does."""

    def pick(log_q: Tensor, k: int) -> Tensor:
        if temperature == 0:
            return log_q.argmax(dim=-1)
        return of_mass(torch.softmax(log_q / temperature, dim=-1), torch.rand(len(log_q), dtype=torch.float64))

    return probabilities.draft(head.circuit.program, *given[:6], pick=pick)


def draft_kernel(
    program: Program, shape: tuple[int, int, int, int], temperature: float, device: torch.device
) -> Callable[[tuple[Tensor, ...]], Tensor]:
    """Return the draft kernel as Model Runner V2 calls it: `DraftParams` -> tokens [B, K].

    Args:
        program: of the circuit.
        shape: [B, K, r, V].
        temperature: of all requests.
        device: of the buffers.
    """
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_noised_argmax

    from vllm_mtpc.kernels.draft.kernel import CircuitDrafter

    batch, drafts, r, vocab_size = shape
    drafter = CircuitDrafter(program, r, vocab_size, device, gumbel_noised_argmax)
    slots = torch.arange(batch, dtype=torch.int32, device=device)
    given = {
        "slots": slots,
        "temperature": torch.full((batch,), temperature, device=device),
        "seeds": slots.long(),
        "pos": slots.long(),
        "tokens": torch.zeros(batch, drafts, dtype=torch.int64, device=device),
        "confidences": torch.zeros(batch, drafts, device=device),
        "cache": torch.zeros(batch, drafts, vocab_size, device=device),
    }

    def draft(params: tuple[Tensor, ...]) -> Tensor:
        drafter(*params, **given)
        return given["tokens"]

    return draft


def weight_bytes(head: Head, num_drafts: int) -> int:
    """Return the bytes of weights that a draft reads: the drafted positions' own ones, the others whole."""
    of_leaves = (1 + num_drafts - head.leaves.skip) / head.leaves.num_leaves
    shares = {"leaf_weight": of_leaves, "component_in": of_leaves, "component_out": of_leaves}
    shares |= {"token_source": num_drafts / head.vocab_size, "token_target": num_drafts / (head.circuit.window - 1)}
    total = 0
    for name, weight in head.named_parameters():
        share = shares.get(name.removeprefix("leaves."), 1)
        total += round(share * weight.numel()) * weight.element_size()
    if head.leaves.needs_lm_head:
        total += head.columns * head.hidden_size * next(head.parameters()).element_size()
    return total


if __name__ == "__main__":
    sys.exit(main())
