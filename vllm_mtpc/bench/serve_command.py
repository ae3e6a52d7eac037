"""`vllm-mtpc bench serve`: compare plain vLLM, its own methods and heads by `vllm bench serve`."""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from vllm_mtpc.bench import comparison
from vllm_mtpc.bench.comparison import PEERS, Comparison, Decoding, engine_arguments, find_heads
from vllm_mtpc.data import prompts
from vllm_mtpc.engine import provenance
from vllm_mtpc.engine.options import serve_arguments
from vllm_mtpc.engine.served import Load
from vllm_mtpc.engine.server import VllmServer, run_server
from vllm_mtpc.errors import UsageError
from vllm_mtpc.eval.evaluator import resolve, target_of
from vllm_mtpc.flags import check_positive, json_object
from vllm_mtpc.report import SERVED, check_file, check_folder, print_table, write_json

VARIANT_HELP = "every head once more, with more of speculative_config: --variant 'K=3={\"num_speculative_tokens\": 3}'"
PEER_HELP = 'another speculative_config of vLLM: --peer \'MTP={"method": "mtp", "num_speculative_tokens": 1}\''
ROOM = 64  # tokens of context after the longest answer: vLLM drafts fewer near the end of the context


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "compare plain vLLM, its own methods and heads on this machine"
    commands = parser.add_subparsers(metavar="WHAT", required=True)
    add = commands.add_parser("serve", help=about, description=__doc__).add_argument
    n: dict[str, Any] = {"type": int, "metavar": "N"}
    add("--target", metavar="MODEL", help="default: the target of the first head")
    add("--heads", nargs="+", default=[], metavar="HEAD", help="MtPC and PTP heads of one target: folders, hub names")
    add("--peers", nargs="*", choices=PEERS, default=list(PEERS), help="vLLM's own methods; default: ngram")
    add("--peer", type=named_json, action="append", default=[], metavar="NAME=JSON", help=PEER_HELP)
    add("--variant", type=named_json, action="append", default=[], metavar="NAME=JSON", help=VARIANT_HELP)
    add("--engine", type=json_object, default={}, metavar="JSON", help="more arguments of every engine (of vllm.LLM)")
    add("--dtype", default=None, help="of the target (default: float32 on a CPU, else auto)")
    add("--data", nargs="+", default=[], metavar="FILE", help="Spec-Bench, jsonl or text (default: the demo's prompts)")
    add("--prompt-tokens", default=64, **n, help="of a piece of a text file (default: 64)")
    add("--max-prompt-tokens", default=1024, **n, help="longer prompts are left out (default: 1024)")
    add("--temperature", type=float, nargs="+", default=[1.0, 0.0], metavar="T", help="default: 1 0")
    clients = [1, 2, 4, 8, 16, 32, 64]
    add("--concurrency", type=int, nargs="+", default=clients, metavar="C", help="default: 1 2 4 8 16 32 64")
    add("--prompts", default=16, **n, help="of a pass at c=1; at least 3 c are sent (default: 16)")
    add("--max-tokens", default=128, **n, help="of an answer (default: 128)")
    add("--rounds", default=3, **n, help="passes of every setting (default: 3)")
    add("--order", choices=list(comparison.ORDERS), help="default: interleaved on a CPU, else sequential")
    add("--logs", type=Path, metavar="DIR", help="keep the engines' logs here (default: removed)")
    add("--json", type=Path, metavar="FILE", help="write the result there")


def run(args: argparse.Namespace) -> int:
    torch.set_num_threads(1)  # this process waits; the cores belong to the engines
    on_gpu = torch.cuda.is_available()
    set_defaults(args, on_gpu)
    check_file(args.json)
    check_folder(args.logs, "--logs")
    decodings = find_decodings(args, on_gpu)
    loads = make_loads(args)
    count = args.rounds * max(load.prompts for load in loads)
    texts = prompts.load(args.data, args.target, count, args.prompt_tokens, args.max_prompt_tokens)
    length = -(-(max(map(len, texts)) + args.max_tokens + ROOM) // 64) * 64
    engine = engine_arguments(args.target, args.dtype, length, max(args.concurrency), on_gpu, args.engine)
    found = Comparison(loads, texts, args.rounds)
    with tempfile.TemporaryDirectory() as folder:

        def start(decoding: Decoding) -> AbstractContextManager[VllmServer]:
            drafts = {} if decoding.is_plain else {"speculative_config": decoding.speculative}
            name = "".join(letter if letter.isalnum() else "-" for letter in decoding.name)
            return run_server(serve_arguments({**engine, **drafts}), (args.logs or Path(folder)) / f"{name}.log")

        found.run(decodings, start, args.order)
    given = {key: value for key, value in vars(args).items() if key not in ("json", "logs", "run", "bench")}
    result = {
        "kind": SERVED,
        **provenance.collect(),
        "definitions": [*comparison.COLUMN_DEFINITIONS, f"{args.order}: {comparison.ORDERS[args.order]}"],
        "settings": {**{key: provenance.public(value) for key, value in given.items()}, "distinct_prompts": len(texts)},
        "rows": comparison.make_rows(found),
        "not_run": [{"name": one.name, "reason": one.fault, "is_required": one.is_required} for one in found.missing],
    }
    if args.json:
        write_json(args.json, result)
    print_table("tok/s, and speed-up over plain vLLM", *comparison.make_table(result["rows"]))
    print("", *(f"not run: {one.name}: {one.fault}" for one in found.missing), *result["definitions"], sep="\n")
    differing = print_identity(found)
    lost = [one.name for one in found.missing if one.is_required]
    if lost or all(row["speedup"] is None for row in result["rows"]):
        print(f"failed: {', '.join(lost)} did not run" if lost else "failed: nothing was compared with plain vLLM")
        return 1
    return 1 if args.dtype == "float32" and differing else 0


def set_defaults(args: argparse.Namespace, on_gpu: bool) -> None:
    """Set options that were not given. Raises UsageError without a target."""
    if not args.target:
        if not args.heads:
            raise UsageError("nothing to compare: name a target (--target) or heads (--heads)")
        args.target = target_of(*resolve(args.heads[0]), None)
    check_positive(args, "prompts", "max_tokens", "rounds", "prompt_tokens")
    if min(args.concurrency) < 1 or min(args.temperature) < 0:
        raise UsageError("--concurrency must be 1 or more, --temperature 0 or more")
    args.dtype = args.dtype or ("auto" if on_gpu else "float32")
    args.order = args.order or ("bracketed" if on_gpu else "interleaved")


def find_decodings(args: argparse.Namespace, on_gpu: bool) -> list[Decoding]:
    """Return the ways of decoding, plain vLLM first."""
    peers = [Decoding(name, PEERS[name]) for name in args.peers]
    peers += [Decoding(name, config, is_required=True) for name, config in args.peer]
    decodings = [Decoding("plain"), *peers, *find_heads(args.heads, dict(args.variant), on_gpu)]
    names = [one.name for one in decodings]
    if again := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"--peer {again[0]}: another row has this name; choose a different one")
    return decodings


def make_loads(args: argparse.Namespace) -> list[Load]:
    """Return the loads: temperatures and numbers of clients."""
    pairs = itertools.product(args.temperature, args.concurrency)
    return [Load(clients, warm, args.max_tokens, max(args.prompts, 3 * clients)) for warm, clients in pairs]


def print_identity(found: Comparison) -> bool:
    """Print the result of the greedy check; return whether an answer differs from plain vLLM's."""
    all_same = all_total = 0
    for one in found.greedy:
        same, total = found.identical(one) or (0, 0)
        all_same, all_total = all_same + same, all_total + total
        if same < total:
            print(f"{one.name}: {total - same} of {total} greedy answers differ from plain vLLM's")
    print(f"identical greedy outputs: {all_same} of {all_total}")
    return all_same < all_total


def named_json(text: str) -> tuple[str, dict[str, Any]]:
    name, _, value = text.partition("={")
    if not name:
        raise ValueError
    return name, json.loads("{" + value)
