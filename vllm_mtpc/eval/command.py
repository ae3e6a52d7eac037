"""`vllm-mtpc eval`: expected tokens/step of a head on text that its target writes, without vLLM."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

    from torch import Tensor

    from vllm_mtpc.eval.acceptance import Figures
    from vllm_mtpc.eval.loading import Loaded, LoadedPtp

CARRIED_OUT = 16  # texts that the unverified ceiling is measured on, one after the other


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from vllm_mtpc.eval import arguments

    arguments.add_head(parser)
    parser.add_argument("--data", required=True, nargs="+", metavar="DATA", help="prompts come from it, as for train")
    parser.add_argument("--split", default="train", help="split of a datasets name (default: train)")
    parser.add_argument("--sequences", type=int, default=64, metavar="N", help="texts per temperature (default: 64)")
    parser.add_argument("--prompt-tokens", type=int, default=32, metavar="P", help="of a crop of text (default: 32)")
    parser.add_argument("--new-tokens", type=int, default=128, metavar="N", help="of a continuation (default: 128)")
    parser.add_argument(
        "--temperature", type=float, nargs="+", metavar="T", help="default: 1 0 (PTP heads: as trained, and 0)"
    )
    parser.add_argument(
        "--top-k", type=int, metavar="K", help="of sampled text (default: 0, off; PTP heads: as trained)"
    )
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="of sampled text (default: 1, off; PTP heads: as trained)"
    )
    parser.add_argument("--num-drafts", type=int, metavar="K", help="drafts per step (default: as the head says)")
    parser.add_argument(
        "--simulate",
        type=int,
        nargs="?",
        const=CARRIED_OUT,
        default=0,
        metavar="N",
        help=f"carry the serving rule out on N texts as well (default: none; N left out: {CARRIED_OUT})",
    )
    parser.add_argument(
        "--candidates",
        type=int,
        nargs="+",
        default=[],
        metavar="M",
        help="PTP heads: tokens/step with the best of M u-sequences per step, too (default: none)",
    )
    parser.add_argument("--batch", type=int, default=64, metavar="B", help="texts written at once (default: 64)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")


@dataclass(frozen=True)
class Evaluation:
    """One temperature. ``unverified_bits``: of the text of the mtp ceiling, per token, under the target."""

    temperature: float
    expected: Figures  # sum of overlaps
    along_text: Figures  # the expectation given these very texts
    simulated: Figures | None
    ceiling: float | None
    own_bits: float | None
    unverified_bits: float | None


def run(args: argparse.Namespace) -> int:
    from vllm_mtpc.config.ptp import PtpConfig
    from vllm_mtpc.data.sources import load_documents
    from vllm_mtpc.errors import UsageError
    from vllm_mtpc.eval.arguments import check_positive, sampling_defaults
    from vllm_mtpc.eval.loading import check_length, drafts_of, load, place, prompts, refuse_draft_layers
    from vllm_mtpc.eval.sampling import Sampling
    from vllm_mtpc.hf import choose_device
    from vllm_mtpc.report import check_file, write_json

    check_positive(args, "sequences", "prompt_tokens", "new_tokens", "batch")
    check_file(args.json)
    choose_device(args.device)
    config = place(args.head)[1]
    is_ptp = isinstance(config, PtpConfig)
    sampling_defaults(args, config)
    for temperature in args.temperature:
        Sampling(temperature, args.top_p, top_k=args.top_k)  # refused before the target is loaded
    if args.candidates and not is_ptp:
        raise UsageError("--candidates: circuits draw no u to choose from; leave it out, or name a PTP head")
    if any(count < 1 for count in args.candidates):
        raise UsageError(f"--candidates {min(args.candidates)}: allowed are 1 and above; give it a positive number")
    loaded = load(args.head, args.target, args.dtype, args.device)
    if args.simulate and not is_ptp:
        refuse_draft_layers(loaded, "--simulate")
    tokenizer, vocab_size = loaded.target.tokenizer, loaded.target.vocab_size
    documents = load_documents(args.data, tokenizer, split=args.split, seed=args.seed, vocab_size=vocab_size)
    texts = prompts(documents, args.sequences, args.prompt_tokens, args.seed)
    drafts = drafts_of(loaded.config, args.num_drafts)
    check_length(loaded.target, texts, args.new_tokens + drafts, "--new-tokens")
    if is_ptp:
        from vllm_mtpc.eval.ptp_command import evaluate as evaluate_one
    else:
        evaluate_one = evaluate
    results = [
        evaluate_one(loaded, texts, loaded.sampling(T, args.top_p, args.top_k), drafts, args) for T in args.temperature
    ]
    _print(loaded, results, drafts)
    if args.json:
        write_json(args.json, _report(loaded, results, drafts, args))
    return 0


def evaluate(
    loaded: Loaded, prompts: list[Tensor], sampling: Any, num_drafts: int, args: argparse.Namespace
) -> Evaluation:
    """Everything about one temperature; of ``args``: new_tokens, seed, batch and simulate."""
    import torch
    from tqdm import tqdm

    from vllm_mtpc.eval import simulate, text
    from vllm_mtpc.eval.acceptance import collect, summarise

    head, target = loaded.head, loaded.target
    generator = torch.Generator(target.device).manual_seed(args.seed)
    label = f"T={sampling.temperature:g}"
    with tqdm(total=len(prompts), desc=f"{label} text", unit="text", disable=None) as bar:
        samples = text.generate(
            target,
            prompts,
            args.new_tokens,
            sampling,
            generator,
            overhang=num_drafts,
            batch=args.batch,
            progress=bar.update,
        )
    if loaded.draft_layers is not None:
        samples = text.with_draft_layers(samples, loaded.draft_layers)
    contexts = collect(head, target, samples, sampling, num_drafts)

    def carry_out(mode: str, count: int) -> list[Any]:
        some = prompts[:count]
        with tqdm(total=len(some), desc=f"{label} {mode}", unit="text", disable=None) as bar:
            return simulate.run(
                mode, head, target, some, args.new_tokens, sampling, num_drafts, args.seed, progress=bar.update
            )

    simulated = simulate.figures(carry_out("speculative", args.simulate)) if args.simulate else None
    ceiling = own_bits = unverified_bits = None
    if loaded.draft_layers is None:
        free = carry_out("mtp", CARRIED_OUT)
        ceiling, unverified_bits = float(1 + num_drafts), simulate.bits(free)
        own_bits = simulate.own_bits(target, samples, len(free))
    return Evaluation(
        sampling.temperature,
        summarise(contexts),
        summarise(contexts, False),
        simulated,
        ceiling,
        own_bits,
        unverified_bits,
    )


def _report(loaded: Any, results: list[Any], drafts: int, args: argparse.Namespace) -> dict[str, Any]:
    from vllm_mtpc.engine import provenance
    from vllm_mtpc.engine.counters import DEFINITIONS

    settings = {key: value for key, value in vars(args).items() if key not in ("run", "json")}
    return {
        **provenance.collect(),
        "head": str(loaded.folder),
        "target": loaded.target.name,
        "definitions": DEFINITIONS.splitlines(),
        "settings": settings,
        "num_drafts": drafts,
        "results": [_clean(asdict(result)) for result in results],
    }


def _clean(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, dict):
        return {key: _clean(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _print(loaded: Loaded | LoadedPtp, results: list[Any], drafts: int) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from vllm_mtpc.engine.counters import DEFINITIONS

    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    config, warnings = loaded.config, []
    if hasattr(config, "variant"):
        from vllm_mtpc.eval import ptp_command

        title, rows = ptp_command.title(loaded, drafts), ptp_command.rows(results)
        warnings = ptp_command.warnings(loaded, results)
    else:
        title = f"{loaded.folder}: {config.circuit}, n={config.window}, r={config.num_components}, K={drafts} drafts"
        rows = _rows(results)
    table = Table(title=Text(f"{title}\non {loaded.target.name}"), title_justify="left")
    table.add_column("")
    for result in results:
        table.add_column(f"T={result.temperature:g}", justify="right")
    for name, values in rows:
        table.add_row(name, *values)
    console.print(table)
    console.print(Text(DEFINITIONS))
    for warning in warnings:
        console.print(Text(warning))


def _rows(results: list[Evaluation]) -> list[tuple[str, list[str]]]:
    def each(show: Any) -> list[str]:
        return [show(result) for result in results]

    def pair(figures: Figures | None) -> str:
        return "-" if figures is None else f"{figures.tokens_per_step:.3f} ± {figures.standard_error:.3f}"

    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    def positions(figures: Figures) -> str:
        return " ".join(f"{value:.2f}".removeprefix("0") for value in figures.per_position)

    rows = [
        ("tokens/step, expected ± s.e.", each(lambda r: pair(r.expected))),
        ("  given these very texts", each(lambda r: pair(r.along_text))),
        ("  simulated", each(lambda r: pair(r.simulated))),
        ("  from any position", each(lambda r: number(r.expected.anywhere))),
        ("acceptance per position", each(lambda r: positions(r.expected))),
        ("unverified (mtp): tokens/step", each(lambda r: number(r.ceiling))),
        ("  bits per token of that text", each(lambda r: number(r.unverified_bits))),
        ("  of the target's own text", each(lambda r: number(r.own_bits))),
        ("bits per token, target", each(lambda r: number(r.expected.target_bits))),
        ("bits per token, circuit's joint", each(lambda r: number(r.expected.joint_bits))),
        ("bits per byte, target", each(lambda r: number(r.expected.per_byte(r.expected.target_bits)))),
        ("bits per byte, circuit's joint", each(lambda r: number(r.expected.per_byte(r.expected.joint_bits)))),
        ("texts, contexts", each(lambda r: f"{r.expected.sequences}, {r.expected.contexts:,}")),
    ]
    return [row for row in rows if set(row[1]) != {"-"}]
