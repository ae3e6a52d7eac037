"""`vllm-mtpc eval`: expected tokens/step of a head on text that its target writes, without vLLM."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_head(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the head, its drafts, its target, device and dtype."""
    add = parser.add_argument
    add("head", metavar="HEAD", help="head folder, target folder that bundles mtpc/, or hub name")
    add("--target", metavar="MODEL", help="folder or hub name (default: the head's own verifier)")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    add("--dtype", choices=DTYPES, default="auto", help="the target computes in (default: its own)")
    add("--num-drafts", type=int, metavar="K", help="drafts per step (default: as the head says)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_head(parser)
    add("--data", required=True, nargs="+", metavar="DATA", help="source of the prompts, as for train")
    add("--split", default="train", help="split of a datasets name (default: train)")
    add("--sequences", type=int, default=64, metavar="N", help="texts per temperature (default: 64)")
    add("--prompt-tokens", type=int, default=32, metavar="P", help="of a crop of text (default: 32)")
    add("--new-tokens", type=int, default=128, metavar="N", help="of a continuation (default: 128)")
    add("--temperature", type=float, nargs="+", metavar="T", help="default: 1 0 (PTP heads: as trained, and 0)")
    add("--top-k", type=int, metavar="K", help="of sampled text (default: 0, off; PTP heads: as trained)")
    add("--top-p", type=float, metavar="P", help="of sampled text (default: 1, off; PTP heads: as trained)")
    add("--seed", type=int, default=0)
    add("--json", type=Path, metavar="FILE", help="write the results to this file as well")


def run(args: argparse.Namespace) -> int:
    from pydantic import TypeAdapter

    from vllm_mtpc.data.sources import load_documents
    from vllm_mtpc.engine import provenance
    from vllm_mtpc.engine.server import DEFINITIONS
    from vllm_mtpc.eval.evaluator import check_drafts, load, resolve
    from vllm_mtpc.eval.text import Sampling, prompts
    from vllm_mtpc.families import FAMILIES
    from vllm_mtpc.flags import check_positive
    from vllm_mtpc.hf import check_length
    from vllm_mtpc.report import check_file, print_table, write_json

    check_positive(args, "sequences", "prompt_tokens", "new_tokens")
    check_file(args.json)
    config = resolve(args.head)[1]
    temperature, top_k, top_p = FAMILIES[config.speculators_model_type].evaluator.default_sampling(config)
    args.temperature = [temperature, 0.0] if args.temperature is None else args.temperature
    args.top_k = top_k if args.top_k is None else args.top_k
    args.top_p = top_p if args.top_p is None else args.top_p
    for value in args.temperature:
        Sampling(value, args.top_p, top_k=args.top_k)  # raises UsageError before anything is loaded
    drafts = check_drafts(config.window, args.num_drafts, config.num_speculative_tokens)
    evaluator = load(args.head, args.target, args.dtype, args.device)
    target = evaluator.target
    documents = load_documents(args.data, target.tokenizer, split=args.split, vocab_size=target.vocab_size)
    texts = prompts(documents, args.sequences, args.prompt_tokens, args.seed)
    check_length(target.name, target.config, texts, args.new_tokens + drafts, "--new-tokens")
    results = [evaluator.measure(texts, temperature, drafts, args) for temperature in args.temperature]
    columns, header = list(map(evaluator.rows, results)), ["", *(f"T={result.temperature:g}" for result in results)]
    lines = [[name, *(column[name] for column in columns)] for name in columns[0]]
    print_table(f"{evaluator.title(drafts)}\non {target.name}", header, lines)
    print(DEFINITIONS, *evaluator.warnings(results), sep="\n")
    if args.json:
        report = {
            **provenance.collect(),
            "head": str(evaluator.folder),
            "target": target.name,
            "definitions": DEFINITIONS.splitlines(),
            "settings": {key: value for key, value in vars(args).items() if key not in ("run", "json")},
            "num_drafts": drafts,
            "results": json.loads(TypeAdapter(Any).dump_json(results)),
        }
        write_json(args.json, report)
    return 0
