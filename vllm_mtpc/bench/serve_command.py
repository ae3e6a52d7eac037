"""`vllm-mtpc bench serve`: plain vLLM, peers and heads side by side in one run."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_mtpc import demo
from vllm_mtpc.bench import decodings, report, rounds
from vllm_mtpc.bench.decodings import OWN, PEERS, V2_INTERPRETED, Decoding, Missing
from vllm_mtpc.data import prompts
from vllm_mtpc.engine import provenance
from vllm_mtpc.engine.passes import Prompt, Setting
from vllm_mtpc.engine.speculation import Speculation
from vllm_mtpc.errors import EngineFailed, UsageError
from vllm_mtpc.eval.loading import resolve, target_of
from vllm_mtpc.flags import check_positive
from vllm_mtpc.report import SERVED, check_file, check_folder, print_table, write_json

VARIANT_HELP = "every head once more, with more of speculative_config: --variant 'K=3={\"num_speculative_tokens\": 3}'"
PEER_HELP = 'another row of vLLM\'s: --peer \'name={"method": "eagle", "model": ...}\', a speculative_config'
CLIENTS = [1, 2, 4, 8, 16, 32, 64]
ROOM = 64  # tokens of context beyond the longest prompt and its answer: drafts near the end are cut there
# Interpreted kernels cost by the call, whatever the size of the model: small passes, and few
INTERPRETED = {"max_tokens": 48, "prompts": 4, "rounds": 2}
DEMO = {"concurrency": [1, 4, 16], "prompts": 8, "max_tokens": 96, "rounds": 8, "minutes": 13.0}
DEFAULTS = {"concurrency": CLIENTS, "prompts": 16, "max_tokens": 128, "rounds": 3, "minutes": None}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    n: dict[str, Any] = {"type": int, "metavar": "N"}
    add("--target", metavar="MODEL", help="default: the verifier of the first head")
    add("--heads", nargs="+", default=[], metavar="HEAD", help="MtPC and PTP heads of one target: folders, hub names")
    add("--demo", action="store_true", help="the packaged target and heads, at most 15 minutes on two CPU cores")
    add("--peers", nargs="*", choices=PEERS, default=list(PEERS), help="vLLM's own methods; default: all that run here")
    add("--peer", type=_variant, action="append", default=[], metavar="NAME=JSON", help=PEER_HELP)
    add("--num-drafts", **n, help="drafts of every method (default: as heads say, 5 for peers)")
    add("--variant", type=_variant, action="append", default=[], metavar="NAME=JSON", help=VARIANT_HELP)
    add("--engine", type=_object, default={}, metavar="JSON", help="more arguments of every engine (of vllm.LLM)")
    add("--dtype", default=None, help="of the target (default: float32 on a CPU, else auto)")
    add("--data", nargs="+", default=[], metavar="FILE", help="Spec-Bench, jsonl or text (default: the demo's prompts)")
    add("--prompt-tokens", default=64, **n, help="of a piece of a text file (default: 64)")
    add("--max-prompt-tokens", default=1024, **n, help="longer prompts are left out (default: 1024)")
    add("--temperature", type=float, nargs="+", default=[1.0, 0.0], metavar="T", help="default: 1 0")
    add("--concurrency", type=int, nargs="+", metavar="C", help=f"default: {' '.join(map(str, CLIENTS))}; demo: 1 4 16")
    add("--prompts", **n, help="of a pass at c=1; at least 3 c are sent (default: 16; demo: 8)")
    add("--max-tokens", **n, help="of an answer (default: 128; demo: 96)")
    add("--stop-at-eos", action="store_true", help="answers may end by themselves (default: all of --max-tokens)")
    add("--rounds", **n, help="how often everything is measured (default: 3; demo: 8)")
    add("--minutes", type=float, metavar="M", help="interleaved: no round begins that would end later (demo: 13)")
    add("--runner", choices=("offline", "http"), default="offline", help="http: vllm serve, with TTFT and TPOT")
    add("--order", choices=("interleaved", "bracketed"), help="default: interleaved on a CPU offline, else bracketed")
    add("--logs", type=Path, metavar="DIR", help="keep the engines' logs here (default: removed)")
    add("--json", type=Path, metavar="FILE", help="write the result there, for `vllm-mtpc plot`")


def run(args: argparse.Namespace) -> int:
    torch.set_num_threads(1)  # this process waits; the cores belong to the engines
    on_gpu = torch.cuda.is_available()
    complete(args, on_gpu)
    check_file(args.json)
    check_folder(args.logs, "--logs")
    members, missing = wanted(args, on_gpu)
    settings = {group: cells(args, group) for group in members}
    most = max(cell.prompts for found in settings.values() for cell in found)
    texts = prompts.load(args.data, args.target, args.rounds * most, args.prompt_tokens, args.max_prompt_tokens)
    with contextlib.ExitStack() as stack:
        # a SIGTERM raises SystemExit here, so that engines are ended on the way out
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        stack.callback(signal.signal, signal.SIGTERM, before)
        logs = args.logs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        comparison = measure(args, members, settings, texts, logs, on_gpu)
    unsaid = ("json", "logs", "untyped", "run", "bench")
    given = {key: provenance.public(value) for key, value in vars(args).items() if key not in unsaid}
    result = {
        "kind": SERVED,
        **provenance.collect(),
        "definitions": [*report.definitions(args.runner == "http"), f"{args.order}: {rounds.HOW[args.order]}"],
        "settings": {**given, "distinct_prompts": len(texts)},
        "rows": report.rows(comparison.passes),
        "not_run": [one._asdict() for one in [*missing, *comparison.missing]],
    }
    if args.json:
        write_json(args.json, result)
    print_result(result)
    # the demo's heads were not chosen by the user: one that this machine cannot run is no failure
    lost = [one.name for one in [*([] if args.demo else missing), *comparison.missing] if one.ours]
    if lost or all(row["speedup"] is None for row in result["rows"]):
        print(f"failed: {', '.join(lost)} did not run" if lost else "failed: nothing was compared with plain vLLM")
        return 1
    return 1 if args.dtype == "float32" and report.differing(result["rows"]) else 0


def complete(args: argparse.Namespace, on_gpu: bool) -> None:
    """Fills in what was not typed. Raises UsageError for words that do not go together."""
    args.untyped = set()
    if args.demo:
        if args.target or args.heads:
            raise UsageError("--demo has its own target and heads; leave --target and --heads out, or --demo")
        args.target = str(demo.path("target"))
        of_gpus = (demo.BACKBONE,) if on_gpu else ()  # elsewhere interpreted, where its speed says nothing
        args.heads = [str(demo.path(name)) for name in (*demo.CIRCUITS, *of_gpus, "late")]
    if not args.target:
        if not args.heads:
            raise UsageError("nothing to compare: name a target (--target), heads (--heads) or --demo")
        args.target = target_of(*resolve(args.heads[0]), None)
    for key, value in (DEMO if args.demo else DEFAULTS).items():
        if getattr(args, key) is None:
            setattr(args, key, value)
            args.untyped.add(key)
    check_positive(args, "prompts", "max_tokens", "rounds", "prompt_tokens", "num_drafts")
    if min(args.concurrency) < 1 or min(args.temperature) < 0:
        raise UsageError("--concurrency must be 1 or more, --temperature 0 or more")
    args.dtype = args.dtype or ("auto" if on_gpu else "float32")
    args.order = args.order or ("bracketed" if on_gpu or args.runner == "http" else "interleaved")


def wanted(args: argparse.Namespace, on_gpu: bool) -> tuple[dict[str, list[Decoding]], list[Missing]]:
    """All ways of decoding by group, plain vLLM first in each, and what cannot be run."""
    speculation = Speculation({"model": args.target, "dtype": args.dtype, **args.engine})
    own, missing = decodings.peers(args.peers, args.peer, args.num_drafts, speculation)
    ours, more = decodings.heads(args.heads, dict(args.variant), args.num_drafts, on_gpu)
    names = ["plain", *(one.name for one in own + ours)]
    if again := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"--peer {again[0]}: there is a row of this name; give it another")
    members = {}
    for group in (OWN, V2_INTERPRETED):
        if found := [one for one in own + ours if one.group == group]:
            members[group] = [decodings.plain(group), *found]
    return members or {OWN: [decodings.plain()]}, missing + more


def cells(args: argparse.Namespace, group: str) -> list[Setting]:
    """The settings of a group: temperatures and numbers of clients."""
    return [
        Setting(
            f"T={temperature:g}, c={clients}",
            clients,
            temperature,
            size(args, group, "max_tokens"),
            max(size(args, group, "prompts"), (1 if group == V2_INTERPRETED else 3) * clients),
            ignore_eos=not args.stop_at_eos,
        )
        for temperature in args.temperature
        for clients in args.concurrency
    ]


def size(args: argparse.Namespace, group: str, key: str) -> int:
    """max_tokens, prompts or rounds of a group: less for interpreted kernels, unless it was typed."""
    value = getattr(args, key)
    return min(value, INTERPRETED[key]) if group == V2_INTERPRETED and key in args.untyped else value


def measure(
    args: argparse.Namespace,
    members: dict[str, list[Decoding]],
    settings: dict[str, list[Setting]],
    texts: Sequence[Prompt],
    logs: Path,
    on_gpu: bool,
) -> rounds.Comparison:
    """All passes. The interpreted group is short and goes first; the other fills the time left."""
    length = -(-(max(map(len, texts)) + args.max_tokens + ROOM) // 64) * 64
    engine = decodings.arguments(args.target, args.dtype, length, max(args.concurrency), on_gpu, args.engine)
    turns = {group: size(args, group, "rounds") for group in settings}
    total = sum(turns[g] * len(settings[g]) * (len(members[g]) + (args.order == "bracketed")) for g in settings)
    deadline = time.monotonic() + 60 * args.minutes if args.minutes else None
    comparison = rounds.Comparison(rounds.Progress(total, deadline))

    def start(decoding: Decoding) -> contextlib.AbstractContextManager[decodings.Engine]:
        comparison.progress.say(f"starting {decoding.name} ({decoding.group})")
        return decodings.start(decoding, engine, texts, logs, args.runner == "http")

    way = rounds.bracketed if args.order == "bracketed" else rounds.interleaved
    for group in sorted(settings, key=lambda group: group == OWN):
        try:
            way(members[group], settings[group], turns[group], start, comparison)
        except EngineFailed as error:  # of plain: nothing of its group can be compared
            if group == OWN:
                raise
            comparison.missing += [Missing(one.name, f"{group}: {error.reason}", one.is_ours) for one in members[group]]
    return comparison


def print_result(result: dict[str, Any]) -> None:
    """Tables, what was not run, definitions, and the cells that lose."""
    found = result["rows"]
    for group in dict.fromkeys(row["group"] for row in found):
        note = "" if group == OWN else f" ({group}: compare these rows with each other only)"
        print_table(f"tok/s and speed-up over plain{note}", *report.overview(found, group))
    print_table("everything", *report.details(found))
    print()
    for one in result["not_run"]:
        print(f"not run: {one['name']}: {one['reason']}")
    for line in result["definitions"]:
        print(line)
    for row in report.unsteady(found):
        least, most = row["tokens_per_second_spread"]
        print(
            f"warning: {report.place(row)}: rounds differ by {most / least:.1f}x; compare CPU seconds, or measure again"
        )
    losing = [f"{report.place(row)} {row['speedup']:.2f}x" for row in report.losing(found)]
    print(f"heads slower than {report.SLOWER:g}x plain: {'; '.join(losing) or 'none'}")
    checked = [row["identical"] for row in found if row["identical"]]
    print(f"identical greedy outputs: {sum(a for a, _ in checked)} of {sum(b for _, b in checked)}")
    for row in report.differing(found):
        print(f"{report.place(row)}: greedy output differs from plain vLLM's")


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text}: expected is a JSON object")
    return value


def _variant(text: str) -> tuple[str, dict[str, Any]]:
    name, _, value = text.partition("={")
    if not name:
        raise argparse.ArgumentTypeError(f"{text}: expected is NAME={{...}}")
    return name, _object("{" + value)
