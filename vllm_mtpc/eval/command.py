"""`vllm-mtpc eval`: expected tokens/step of a head on text that its target writes, without vLLM."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

    from torch import Tensor

    from vllm_mtpc.eval.evaluator import Evaluator

CARRIED_OUT = 16  # texts of --simulate where it names no number


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
    arguments.add_sampling(parser)
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
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")


def run(args: argparse.Namespace) -> int:
    from vllm_mtpc.data.sources import load_documents
    from vllm_mtpc.errors import UsageError
    from vllm_mtpc.eval.arguments import fill_sampling
    from vllm_mtpc.eval.loading import drafts_of, evaluator_of, load, prompts, resolve
    from vllm_mtpc.eval.sampling import Sampling
    from vllm_mtpc.flags import check_positive
    from vllm_mtpc.hf import check_length, choose_device
    from vllm_mtpc.report import check_file, write_json

    check_positive(args, "sequences", "prompt_tokens", "new_tokens", "batch")
    check_file(args.json)
    choose_device(args.device)
    config = resolve(args.head)[1]
    family = evaluator_of(config)
    fill_sampling(args, family, config)
    for temperature in args.temperature:
        Sampling(temperature, args.top_p, top_k=args.top_k)  # refused before the target is loaded
    family.check_options(args)
    if any(count < 1 for count in args.candidates):
        raise UsageError(f"--candidates {min(args.candidates)}: allowed are 1 and above; give it a positive number")
    evaluator = load(args.head, args.target, args.dtype, args.device)
    if args.simulate:
        evaluator.check_decoding("--simulate")
    target = evaluator.target
    documents = load_documents(args.data, target.tokenizer, split=args.split, vocab_size=target.vocab_size)
    texts = prompts(documents, args.sequences, args.prompt_tokens, args.seed)
    drafts = drafts_of(config, args.num_drafts)
    check_length(target, texts, args.new_tokens + drafts, "--new-tokens")
    results = [_evaluate(evaluator, texts, temperature, drafts, args) for temperature in args.temperature]
    _print(evaluator, results, drafts)
    if args.json:
        write_json(args.json, _report(evaluator, results, drafts, args))
    return 0


def _evaluate(
    evaluator: Evaluator, prompts: list[Tensor], temperature: float, num_drafts: int, args: argparse.Namespace
) -> Any:
    """Results of one temperature."""
    import torch
    from tqdm import tqdm

    from vllm_mtpc.eval.decode import continue_all, counted
    from vllm_mtpc.eval.text import generate

    target, sampling = evaluator.target, evaluator.sampling(temperature, args.top_p, args.top_k)
    generator, label = torch.Generator(target.device).manual_seed(args.seed), f"T={temperature:g}"
    with tqdm(total=len(prompts), desc=f"{label} text", unit="text", disable=None) as bar:
        how = {"overhang": num_drafts, "batch": args.batch, "progress": bar.update}
        samples = generate(target, prompts, args.new_tokens, sampling, generator, **how)
    found = evaluator.evaluate(samples, sampling, num_drafts, args)
    if not args.simulate:
        return found
    drafting, some = evaluator.drafting(sampling, num_drafts, args.seed), prompts[: args.simulate]
    texts = continue_all("speculative", target, some, drafting, args.new_tokens, f"{label} speculative")
    return replace(found, simulated=counted(texts))


def _report(evaluator: Evaluator, results: list[Any], drafts: int, args: argparse.Namespace) -> dict[str, Any]:
    from vllm_mtpc.engine import provenance
    from vllm_mtpc.engine.counters import DEFINITIONS

    return {
        **provenance.collect(),
        "head": str(evaluator.folder),
        "target": evaluator.target.name,
        "definitions": DEFINITIONS.splitlines(),
        "settings": {key: value for key, value in vars(args).items() if key not in ("run", "json")},
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


def _print(evaluator: Evaluator, results: list[Any], drafts: int) -> None:
    from rich.table import Table
    from rich.text import Text

    from vllm_mtpc.engine.counters import DEFINITIONS
    from vllm_mtpc.report import console

    table = Table(title=Text(f"{evaluator.title(drafts)}\non {evaluator.target.name}"), title_justify="left")
    table.add_column("")
    for result in results:
        table.add_column(f"T={result.temperature:g}", justify="right")
    for name, values in evaluator.rows(results):
        if set(values) != {"-"}:
            table.add_row(name, *values)
    for part in (table, Text(DEFINITIONS), *map(Text, evaluator.warnings(results))):
        console().print(part)
