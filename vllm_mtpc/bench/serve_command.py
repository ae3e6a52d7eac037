"""`vllm-mtpc bench serve`: compare plain vLLM, its own methods and heads by `vllm bench serve`.

Passes are ordered so that a machine whose speed drifts does not decide the comparison.
Interleaved (engines that fit on the machine together, as on a CPU): all engines run, and one measures at a time. Every
round runs each load on all engines, every second round in the opposite order; speed-ups are those of a round.
Bracketed (an engine needs the whole GPU): one engine after the other, plain vLLM first and last; speed-ups are over
the mean of its passes.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from vllm_mtpc.data import prompts
from vllm_mtpc.engine import provenance
from vllm_mtpc.engine.served import Load, PassResult, Prompt, complete_greedy, measure
from vllm_mtpc.engine.server import DEFINITIONS, ON_CPU, Acceptance, VllmServer, run_server, serve_arguments
from vllm_mtpc.errors import EngineFailed, UsageError
from vllm_mtpc.eval.evaluator import resolve, target_of
from vllm_mtpc.families import FAMILIES
from vllm_mtpc.flags import check_positive, json_object
from vllm_mtpc.report import SERVED, Bar, check_file, check_folder, print_table, write_json

CHECKED = 8  # prompts of the greedy check
PEERS = {  # vLLM's own methods, with the options that gave the most tokens/step on the demo of those tried
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 5, "prompt_lookup_min": 2}
}
ORDERS = {
    "interleaved": "every round runs each load on all engines in turn, each second round in the opposite order; "
    "speed-up: over plain's pass of the same round, median of the rounds (least and most).",
    "bracketed": "one engine after the other, plain first and last; speed-up: over the mean of plain's passes, median "
    "of the rounds (least and most).",
}
COLUMN_DEFINITIONS = (
    *DEFINITIONS.splitlines(),
    "identical: greedy answers that equal plain vLLM's token for token, of a check apart from the passes.",
    "TTFT: time to the first token of a request; TPOT: time per later token; medians over requests.",
    "seconds, cpu_seconds: of each pass, by the clock and of the server's processes.",
)
VARIANT_HELP = "every head once more, with more of speculative_config: --variant 'K=3={\"num_speculative_tokens\": 3}'"
PEER_HELP = 'another speculative_config of vLLM: --peer \'MTP={"method": "mtp", "num_speculative_tokens": 1}\''
ROOM = 64  # tokens of context after the longest answer: vLLM drafts fewer near the end of the context


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "compare plain vLLM, its own methods and heads on this machine"
    commands = parser.add_subparsers(metavar="WHAT", required=True)
    add = commands.add_parser("serve", help=about, description=about).add_argument
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
    add("--order", choices=list(ORDERS), help="default: interleaved on a CPU, else sequential")
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
        "definitions": [*COLUMN_DEFINITIONS, f"{args.order}: {ORDERS[args.order]}"],
        "settings": {**{key: provenance.public(value) for key, value in given.items()}, "distinct_prompts": len(texts)},
        "rows": make_rows(found),
        "not_run": [{"name": one.name, "reason": one.fault, "is_required": one.is_required} for one in found.missing],
    }
    if args.json:
        write_json(args.json, result)
    print_table("tok/s, and speed-up over plain vLLM", *make_table(result["rows"]))
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


@dataclass(frozen=True, eq=False)
class Decoding:
    name: str  # of its rows
    speculative: dict[str, Any] | None = None  # vLLM's speculative_config; None: plain vLLM
    is_required: bool = False  # the command fails if it cannot run: a head, or a peer that the user configured
    fault: str = ""  # why it cannot run here; empty if it can

    @property
    def is_plain(self) -> bool:
        return self.speculative is None

    @property
    def is_ours(self) -> bool:
        return (self.speculative or {}).get("method") in FAMILIES


def find_heads(names: Sequence[str], variants: Mapping[str, dict[str, Any]], on_gpu: bool) -> list[Decoding]:
    """Return heads (folders or hub names), each as its checkpoint says and with each variant of speculative_config.

    PTP heads and draft layers need Model Runner V2: a GPU, or the interpreted kernels of scripts/v2_on_cpu.sh.
    Raises UsageError for a head that is named twice.
    """
    configs = [resolve(name)[1] for name in names]
    has_v2 = on_gpu or os.environ.get("TRITON_INTERPRET") == "1"
    found = []
    for label, name, config in zip(_labels(names, configs), names, configs, strict=True):
        given = {"method": config.speculators_model_type, "model": name}
        needs_v2 = getattr(config, "has_draft_layers", True)  # PTP heads always
        fault = "needs a GPU, or scripts/v2_on_cpu.sh vllm-mtpc bench serve ..." if needs_v2 and not has_v2 else ""
        head = Decoding(label, given, is_required=True, fault=fault)
        more = (replace(head, name=f"{label}, {key}", speculative=given | own) for key, own in variants.items())
        found += [head, *more]
    return found


def _labels(names: Sequence[str], configs: Sequence[Any]) -> list[str]:
    """Return different names: the circuit or variant, after the folder if that has another name, and its parents.

    An FF head predicts the tokens of a window independently of each other, as Medusa's heads do.
    """
    paths = [Path(os.path.abspath(name)).parts for name in names]
    if len(set(paths)) < len(paths):
        raise UsageError("the same head is named twice; name each head once")
    depth = next(depth for depth in itertools.count(1) if len({path[-depth:] for path in paths}) == len(paths))
    labels = []
    for path, config in zip(paths, configs, strict=True):
        folder, circuit = "/".join(path[-depth:]), getattr(config, "circuit", None)
        kind = circuit.kind if circuit else config.variant
        label = "ff (Medusa-style)" if kind == "ff" else kind
        labels.append(label if folder == kind else f"{folder} [{label}]")
    return labels


def engine_arguments(
    target: str, dtype: str, max_model_len: int, max_num_seqs: int, on_gpu: bool, more: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of every engine of a run, by their names in `vllm.LLM`; `more` has precedence."""
    sizes = {"max_model_len": max_model_len, "max_num_seqs": max_num_seqs}
    common = {"model": target, "dtype": dtype, **sizes, "enable_prefix_caching": False, "seed": 0}  # prompts repeat
    return {**common, **({} if on_gpu else ON_CPU), **more}


@dataclass
class Pass:
    """One pass of a way of decoding; `baseline`: tokens/s of plain vLLM that it is compared with."""

    decoding: Decoding
    load: Load
    round: int
    result: PassResult
    baseline: float = 0.0

    @property
    def speedup(self) -> float:
        return self.result.tokens_per_second / self.baseline


@dataclass
class Comparison:
    """Every load, measured with every way of decoding."""

    loads: Sequence[Load] = ()
    prompts: Sequence[Prompt] = ()  # of all rounds; every round has other ones, and they repeat if there are too few
    rounds: int = 1  # passes of an engine under every load
    passes: list[Pass] = field(default_factory=list)
    greedy: dict[Decoding, list[list[int]]] = field(default_factory=dict)  # answers of the greedy check
    missing: list[Decoding] = field(default_factory=list)  # that could not run, each with its fault

    def run(
        self, decodings: Sequence[Decoding], start: Callable[[Decoding], AbstractContextManager[VllmServer]], order: str
    ) -> None:
        """Measure all ways of decoding without a fault, plain vLLM first, in an order of ORDERS.

        Raises EngineFailed if plain vLLM failed: without it nothing can be compared.
        """
        self.missing = [one for one in decodings if one.fault]
        running = [one for one in decodings if not one.fault]
        together = order == "interleaved"
        groups = [running] if together else [[one] for one in (*running, running[0])]
        with Bar(total=sum(map(len, groups)) * self.rounds * len(self.loads), desc="passes", unit="pass") as bar:
            for group in groups:
                self._measure_group(group, start, bar)
        plain = [one for one in self.passes if one.decoding.is_plain]
        for one in self.passes:
            alike = [other for other in plain if other.load == one.load and (other.round == one.round or not together)]
            one.baseline = fmean(other.result.tokens_per_second for other in alike)

    def identical(self, decoding: Decoding) -> tuple[int, int] | None:
        """Return how many greedy answers equal those of plain vLLM, and their number."""
        plain = next((found for one, found in self.greedy.items() if one.is_plain), [])
        if decoding.is_plain or decoding not in self.greedy:
            return None
        return sum(mine == its for mine, its in zip(self.greedy[decoding], plain, strict=True)), len(plain)

    def _measure_group(self, decodings: Sequence[Decoding], start: Callable[..., Any], bar: Bar) -> None:
        clients: dict[Decoding, VllmServer] = {}

        @contextlib.contextmanager
        def may_fail(decoding: Decoding) -> Iterator[None]:
            try:
                yield
            except EngineFailed as error:
                if decoding.is_plain:
                    raise
                clients.pop(decoding, None)
                self.missing.append(replace(decoding, fault=f"its engine failed: {error.reason}"))

        def choose(first: int, count: int) -> list[Prompt]:
            return list(itertools.islice(itertools.cycle(self.prompts), first, first + count))

        with contextlib.ExitStack() as stack:
            for decoding in decodings:
                bar.set_postfix_str(f"starting {decoding.name}")
                with may_fail(decoding):
                    client = clients[decoding] = stack.enter_context(start(decoding))
                    self.greedy[decoding] = complete_greedy(client, choose(0, CHECKED), self.loads[0].max_tokens)
            for turn, load in itertools.product(range(self.rounds), self.loads):
                chosen = choose(turn * load.prompts, load.prompts)
                for decoding in list(clients)[:: -1 if turn % 2 else 1]:
                    with may_fail(decoding):
                        one = measure(clients[decoding], load, chosen)
                        self.passes.append(Pass(decoding, load, turn, one))
                        rate, step = one.tokens_per_second, one.acceptance.tokens_per_step
                        bar.set_postfix_str(f"{decoding.name}, {load.name}: {rate:.1f} tok/s, {step:.2f} tokens/step")
                        bar.update()


def make_rows(comparison: Comparison) -> list[dict[str, Any]]:
    """Return one row per setting and way of decoding; results are medians over rounds."""
    passes: dict[tuple[Any, ...], list[Pass]] = {}
    for one in sorted(comparison.passes, key=lambda one: (-one.load.temperature, one.load.clients)):
        passes.setdefault((one.load, one.decoding.name), []).append(one)
    rows = []
    for found in passes.values():
        decoding, load, results = found[0].decoding, found[0].load, [one.result for one in found]
        rates, speedups = [one.tokens_per_second for one in results], [one.speedup for one in found]
        accepted = sum((one.acceptance for one in results), Acceptance())
        row = {
            "decoding": decoding.name,
            "ours": decoding.is_ours,
            "setting": load.name,
            "temperature": load.temperature,
            "clients": load.clients,
            "prompts": load.prompts,
            "max_tokens": load.max_tokens,
            "rounds": len(found),
            "tokens_per_second": round(median(rates), 2),
            "tokens_per_second_spread": [round(min(rates), 2), round(max(rates), 2)],
            "speedup": None if decoding.is_plain else round(median(speedups), 4),
            "speedup_spread": None if decoding.is_plain else [round(min(speedups), 4), round(max(speedups), 4)],
            "tokens_per_step": round(accepted.tokens_per_step, 4),
            "acceptance_per_position": [round(rate, 4) for rate in accepted.per_position],
            "identical": comparison.identical(decoding) if load.temperature == 0 else None,
            "ttft_ms": round(median(one.ttft_ms for one in results), 3),
            "tpot_ms": round(median(one.tpot_ms for one in results), 3),
            "speedups": [round(value, 4) for value in speedups],
            "tokens": [one.tokens for one in results],
            "seconds": [round(one.seconds, 4) for one in results],
            "cpu_seconds": [round(one.cpu_seconds, 3) for one in results],
        }
        rows.append(row)
    return rows


def make_table(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the header and lines of a table; - where there is no value."""
    names = "T, c|decoding|tok/s|speed-up|least..most|tokens/step|acceptance|TTFT ms|TPOT ms|identical"
    lines = []
    for row in rows:
        speedup, spread, same = row["speedup"], row["speedup_spread"], row["identical"]
        line = [row["setting"], row["decoding"], f"{row['tokens_per_second']:.1f}"]
        line += [f"{speedup:.2f}x", f"{spread[0]:.2f}..{spread[1]:.2f}"] if speedup else ["-", "-"]
        line += [f"{row['tokens_per_step']:.2f}"]
        line += [" ".join(f"{rate:.2f}" for rate in row["acceptance_per_position"]) or "-"]
        line += [f"{row['ttft_ms']:.1f}", f"{row['tpot_ms']:.2f}", f"{same[0]} of {same[1]}" if same else "-"]
        lines.append(line)
    return names.split("|"), lines
