"""Ways of decoding, measured so that a machine whose speed drifts does not decide the comparison, and their table.

Interleaved (engines that fit on the machine together, as on a CPU): all engines run, and one measures at a time. Every
round runs each load on all engines, every second round in the opposite order; speed-ups are those of a round.
Bracketed (an engine needs the whole GPU): one engine after the other, plain vLLM first and last; speed-ups are over
the mean of its passes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from vllm_mtpc.engine.counters import DEFINITIONS, Acceptance
from vllm_mtpc.engine.options import ON_CPU
from vllm_mtpc.engine.served import Load, PassResult, Prompt, complete_greedy, measure
from vllm_mtpc.engine.server import VllmServer
from vllm_mtpc.errors import EngineFailed, UsageError
from vllm_mtpc.eval.evaluator import resolve
from vllm_mtpc.families import FAMILIES
from vllm_mtpc.progress import Bar

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


@dataclass(frozen=True, eq=False)
class Decoding:
    """One way of decoding."""

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
