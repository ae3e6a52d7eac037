"""`vllm-mtpc bench draft`: what a draft costs, by circuit and batch, against a step of the target.

The head alone, without an engine: its parameters for the drafts (`draft_params`), and the tokens drawn from the circuit
(`kernels.draft`; its kernel on a GPU, its definition in PyTorch elsewhere). What an engine adds is in `bench serve`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tqdm import tqdm

from vllm_mtpc.bench import timing
from vllm_mtpc.checkpoint import load_head
from vllm_mtpc.circuits import CIRCUITS, circuit_class
from vllm_mtpc.config.mtpc import HeadConfig
from vllm_mtpc.errors import UsageError
from vllm_mtpc.eval.loading import resolve
from vllm_mtpc.heads import build_head
from vllm_mtpc.heads.backbone import BackboneHead
from vllm_mtpc.heads.base import DraftParams, Head
from vllm_mtpc.hf import choose_device
from vllm_mtpc.kernels.draft import naive
from vllm_mtpc.kernels.filter.program import Program
from vllm_mtpc.kernels.pick.naive import of_mass
from vllm_mtpc.report import check_file

KIND = "bench draft"
BATCHES = [1, 2, 4, 8, 16, 32, 64]
CONTEXT = 512  # tokens that the layers of a backbone read
BYTES = 320  # vocabulary of EvaByte; more than that asks for a head that shares the target's own lm_head
DEFINITIONS = (
    "params ms: the head's products for one draft of K tokens per request, and of a backbone its pass behind "
    f"{CONTEXT} tokens; tokens ms: K tokens from the circuit; draft ms: both in one go. Medians, with quartiles.",
    "MiB: weights that every draft must read, whatever the batch; floor ms: these bytes at the bandwidth of a large "
    "copy on this device. A head that fits a cache may be below it.",
    "captured ms: both as one CUDA graph; launches: kernels, copies and fills of a draft that is not captured.",
    "of a step: draft ms (captured, where it was) by the milliseconds of a step of the target, draft not included.",
)
COLUMNS = (
    ("head", "head"),
    ("K", "drafts"),
    ("T", "temperature", "{:g}"),
    ("batch", "batch"),
    ("params ms", "params_ms", "{0[0]:.3f}"),
    ("tokens ms", "tokens_ms", "{0[0]:.3f}"),
    ("draft ms", "draft_ms", "{0[0]:.3f}"),
    ("quartiles", "draft_ms", "{0[1]:.3f}..{0[2]:.3f}"),
    ("captured ms", "captured_ms", "{0[0]:.3f}"),
    ("launches", "launches"),
    ("MiB", lambda row: row["weight_bytes"] / 2**20, "{:.2f}"),
    ("floor ms", "floor_ms", "{:.3f}"),
    ("of a step", "share", "{:.1%}"),
)


class Shape(NamedTuple):
    """Sizes of a random head; weights matter to no time. c, M: component_rank and support, where it has them."""

    D: int
    V: int
    n: int
    r: int
    c: int = 0
    M: int = 0


class Case(NamedTuple):
    """A head to be timed."""

    name: str
    head: Head
    num_drafts: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--head", nargs="+", default=[], metavar="HEAD", help="MtPC heads: folders or hub names")
    add(
        "--shape",
        nargs="+",
        type=shape,
        default=[],
        metavar="D=..,V=..,n=..,r=..",
        help="sizes of random heads; c=.., M=..: component_rank, support",
    )
    add("--circuits", nargs="+", choices=CIRCUITS, default=list(CIRCUITS), help="of --shape (default: all)")
    add("--num-drafts", type=int, metavar="K", help="default: as the head says, n - 1 for shapes")
    add("--batch", nargs="+", type=int, default=BATCHES, metavar="B", help="default: 1 2 4 8 16 32 64")
    add("--temperature", nargs="+", type=float, default=[1.0, 0.0], metavar="T", help="default: 1 0")
    add("--step-ms", nargs="+", type=float, default=[], metavar="MS", help="of the target: one, or one per batch size")
    add("--curves", type=Path, metavar="FILE", help="steps measured in an engine: `vllm-mtpc advise --measure FILE`")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights (default: as they are served)")
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--repeats", type=int, default=50, metavar="N", help="timed calls (default: 50)")
    add("--json", type=Path, metavar="FILE", help="write the result there")


def shape(text: str) -> Shape:
    """`D=4096,V=320,n=8,r=32`."""
    try:
        pairs = dict(word.split("=") for word in text.split(","))
        return Shape(**{key: int(value) for key, value in pairs.items()})
    except (ValueError, TypeError):
        raise argparse.ArgumentTypeError(f"{text!r}: expected is D=4096,V=320,n=8,r=32, then c=16 and M=1024") from None


def run(args: argparse.Namespace) -> int:
    check(args)
    check_file(args.json)
    device = choose_device(args.device)
    # as the proposers choose it
    has_bfloat16 = device.type == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    dtype = getattr(torch, args.dtype or ("bfloat16" if has_bfloat16 else "float32"))
    bandwidth = timing.bytes_per_second(device)
    rows: list[dict[str, Any]] = []
    total = (len(args.head) + len(random_configs(args))) * len(args.batch) * len(args.temperature)
    with torch.inference_mode(), tqdm(total=total, unit="cell", disable=None) as bar:
        for case in cases(args, dtype, device):
            step_ms = steps(args, case.num_drafts)
            for batch, temperature in ((b, t) for b in args.batch for t in args.temperature):
                rows.append(row(case, batch, temperature, args.repeats, bandwidth, step_ms.get(batch)))
                bar.update()
    how = {
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "repeats": args.repeats,
        "gigabytes_per_second": round(bandwidth / 1e9, 1),
        "steps": args.curves.name if args.curves else args.step_ms,
    }
    title = f"draft on {device}, {how['dtype']}, {how['threads']} CPU threads, {how['gigabytes_per_second']} GB/s"
    timing.publish(args.json, KIND, title, COLUMNS, [], rows, DEFINITIONS, how=how)
    return 0


def check(args: argparse.Namespace) -> None:
    if not args.head and not args.shape:
        raise UsageError("nothing to time: name heads (--head) or sizes (--shape D=4096,V=320,n=8,r=32)")
    if args.curves and args.step_ms:
        raise UsageError("--curves and --step-ms both give the target's step; leave one of them out")
    if len(args.step_ms) not in (0, 1, len(args.batch)):
        raise UsageError(f"--step-ms: {len(args.step_ms)} values; give one, or one per batch size")
    for key in ("batch", "step_ms", "repeats", "num_drafts"):
        values = getattr(args, key)
        if values is not None and values != [] and min(values if isinstance(values, list) else [values]) <= 0:
            raise UsageError(f"--{key.replace('_', '-')}: must be above 0")


def default_head(vocab_size: int) -> str:
    """The kind of head for a vocabulary: leaves of their own would be larger than the target from some size on."""
    return "linear" if vocab_size <= BYTES else "shared"


def cases(args: argparse.Namespace, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """The heads one by one, so that only one is in memory."""

    def case(name: str, head: Head, num_drafts: int) -> Case:
        if head.needs_lm_head:
            lent = torch.randn(head.vocab_size, head.hidden_size, dtype=dtype, device=device)
            head.bind_lm_head(lambda hidden: F.linear(hidden, lent))
            if isinstance(head, BackboneHead):
                head.bind_embedding(lambda tokens: F.embedding(tokens, lent))
        return Case(name, head, min(args.num_drafts or num_drafts, head.circuit.window - 1))

    for name in args.head:
        config, head = load_head(resolve(name)[0], dtype, device)
        label = f"{config.circuit} n={config.window} r={config.num_components} {config.head}"
        yield case(label, head, config.num_speculative_tokens)
    for name, config in random_configs(args).items():
        torch.manual_seed(0)
        with torch.device(device):
            head = build_head(config).to(dtype).eval()
        yield case(name, head, config.window - 1)


def random_configs(args: argparse.Namespace) -> dict[str, HeadConfig]:
    """The heads of --shape by name; a circuit without latents has no components to tell apart: one for every c."""
    found = {}
    for sizes, circuit in ((sizes, circuit) for sizes in args.shape for circuit in args.circuits):
        r = min(sizes.r, circuit_class(circuit).max_components)
        rank = sizes.c if r > 1 else 0
        given = {"circuit": circuit, "window": sizes.n, "num_components": r, "head": default_head(sizes.V)}
        given |= {"component_rank": rank or None, "support": sizes.M or None}
        less = f" c={rank}" * bool(rank) + f" M={sizes.M}" * bool(sizes.M)
        name = f"{circuit} n={sizes.n} r={r}{less} D={sizes.D} V={sizes.V} (random)"
        found[name] = HeadConfig.create(**given, target={"vocab_size": sizes.V, "hidden_size": sizes.D}, verifier="-")
    return found


def row(
    case: Case, batch: int, temperature: float, repeats: int, bandwidth: float, step_ms: float | None
) -> dict[str, Any]:
    """One head at one batch size and temperature."""
    head, device = case.head, next(case.head.parameters()).device
    params, tokens, both = parts(case, batch, temperature)
    times: dict[str, Any] = {
        f"{name}_ms": timing.measure(call, device, repeats)
        for name, call in (("params", params), ("tokens", tokens), ("draft", both))
    }
    graph = timing.captured(both) if device.type == "cuda" else None
    times["captured_ms"] = timing.measure(graph, device, repeats) if graph else None
    served_ms = (times["captured_ms"] or times["draft_ms"]).median
    moved = weight_bytes(head, case.num_drafts)
    return {
        "head": case.name,
        "drafts": case.num_drafts,
        "batch": batch,
        "temperature": temperature,
        **times,
        "launches": timing.launches(both) if device.type == "cuda" else None,
        "weight_bytes": moved,
        "floor_ms": round(1000 * moved / bandwidth, 5),
        "step_ms": step_ms,
        "share": None if step_ms is None else round(served_ms / step_ms, 5),
    }


def parts(case: Case, batch: int, temperature: float) -> tuple[Callable[[], Any], ...]:
    """Calls to be timed: parameters; tokens from given parameters, by the kernel on a GPU; both."""
    head, num_drafts = case.head, case.num_drafts
    weight = next(head.parameters())
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(batch, head.hidden_size, generator=generator).to(weight.device, weight.dtype)
    first = torch.randint(0, head.vocab_size, (batch,), generator=generator).to(weight.device)
    read = backbone_pass(head, first, num_drafts) if isinstance(head, BackboneHead) else lambda: hidden
    if weight.device.type == "cuda":
        leaf = (batch, num_drafts, head.circuit.num_components, head.vocab_size)
        draw = timing.draft_kernel(head.circuit.program, leaf, temperature, weight.device, head.support)
    else:
        draw = _definition(head.circuit.program, (batch, num_drafts, head.vocab_size), temperature)

    def params() -> DraftParams:
        return head.draft_params(read(), first, num_drafts)

    return params, partial(draw, params()), lambda: draw(params())


def backbone_pass(head: BackboneHead, first: torch.Tensor, num_drafts: int) -> Callable[[], torch.Tensor]:
    """States of a window per request: keys and values of what a step verified, then the layers behind the context."""
    backbone, batch, verified = head.backbone, len(first), num_drafts + 1
    weight, attention = backbone.fc.weight, backbone.layers[0].self_attn
    aux = torch.randn(batch, verified, backbone.fc.in_features).to(weight)
    keys = torch.randn(2, len(backbone.layers), batch, attention.kv_heads, CONTEXT, attention.head_dim).to(weight)
    layers = list(zip(*keys, strict=True))
    new = torch.arange(CONTEXT - verified, CONTEXT, device=weight.device).expand(batch, -1)
    positions = torch.arange(CONTEXT, CONTEXT + head.num_queries, device=weight.device).expand(batch, -1)
    mask = torch.ones(batch, 1, head.num_queries, CONTEXT + head.num_queries, dtype=torch.bool, device=weight.device)

    def read() -> torch.Tensor:
        for cached, given in zip(layers, backbone.context(aux, new), strict=True):
            for whole, part in zip(cached, given, strict=True):
                whole[:, :, -verified:] = part
        return backbone(head.queries(first), positions, layers, mask)

    return read


def _definition(program: Program, shape: tuple[int, int, int], temperature: float) -> Callable[[Any], torch.Tensor]:
    """Tokens of a head's parameters as on the V1 runner, with buffers of the shape [B, K, V]."""
    probs = torch.zeros(shape)

    def draw(given: DraftParams) -> torch.Tensor:
        u = torch.rand(shape[:2], dtype=torch.float64)

        def pick(log_q: torch.Tensor, k: int) -> torch.Tensor:
            if temperature == 0:
                return log_q.argmax(dim=-1)
            return of_mass(torch.softmax(log_q / temperature, dim=-1, out=probs[:, k]), u[:, k])

        return naive.draft(program, *given, pick=pick)

    return draw


def weight_bytes(head: Head, num_drafts: int) -> int:
    """Weights that a draft reads: of positions that have their own those that are drafted, the rest whole.

    Of token_source a row per draft.
    """
    of_leaves = (1 + num_drafts) / head.circuit.window
    shares = {"leaf_weight": of_leaves, "component_in": of_leaves, "component_out": of_leaves}
    shares |= {"token_source": num_drafts / head.vocab_size, "token_target": num_drafts / (head.circuit.window - 1)}
    total = 0
    for name, weight in head.named_parameters():
        share = next((share for start, share in shares.items() if name.startswith(start)), 1)
        total += round(share * weight.numel()) * weight.element_size()
    if head.needs_lm_head:
        total += head.vocab_size * head.hidden_size * next(head.parameters()).element_size()
    return total


def steps(args: argparse.Namespace, num_drafts: int) -> dict[int, float]:
    """Milliseconds of a step of the target by batch size, as far as they are given."""
    if not args.curves:
        given = args.step_ms * len(args.batch) if len(args.step_ms) == 1 else args.step_ms
        return dict(zip(args.batch, given, strict=False))
    try:
        found = json.loads(args.curves.read_text(encoding="utf-8"))["step_ms"]
        by_rows = {rows: ms for *_, rows, ms in found}  # [rows, ms] or [batch, rows, ms]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{args.curves}: not a file of `vllm-mtpc advise --measure` ({error})") from None
    wanted = {batch: batch * (1 + num_drafts) for batch in args.batch}
    return {batch: by_rows[rows] for batch, rows in wanted.items() if by_rows.get(rows) is not None}
