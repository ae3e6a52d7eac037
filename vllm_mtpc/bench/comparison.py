"""Measure several ways of decoding so that a machine whose speed drifts does not decide the comparison.

Interleaved (engines that fit on the machine together, as on a CPU): all engines run, and one measures at a time. Every
round runs each load on all engines, every second round in the opposite order; speed-ups are those of a round.
Bracketed (an engine needs the whole GPU): one engine after the other, plain vLLM first and last; speed-ups are over
the mean of its passes.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from statistics import fmean

from vllm_mtpc.bench.decodings import Decoding
from vllm_mtpc.engine.served import Load, PassResult, Prompt, complete_greedy, measure
from vllm_mtpc.engine.server import VllmServer
from vllm_mtpc.errors import EngineFailed
from vllm_mtpc.progress import Bar

Start = Callable[[Decoding], AbstractContextManager[VllmServer]]
CHECKED = 8  # prompts of the greedy check
ORDERS = {
    "interleaved": "every round runs each load on all engines in turn, each second round in the opposite order; "
    "speed-up: over plain's pass of the same round, median of the rounds (least and most).",
    "bracketed": "one engine after the other, plain first and last; speed-up: over the mean of plain's passes, median "
    "of the rounds (least and most).",
}


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
    """Every load, measured with every way of decoding.

    Attributes:
        loads: how requests are sent.
        prompts: of all rounds; every round has other ones, and they repeat if there are too few.
        rounds: passes of an engine under every load.
        passes: results.
        greedy: answers of the greedy check.
        missing: ways of decoding that could not run, each with its fault.
    """

    loads: Sequence[Load] = ()
    prompts: Sequence[Prompt] = ()
    rounds: int = 1
    passes: list[Pass] = field(default_factory=list)
    greedy: dict[Decoding, list[list[int]]] = field(default_factory=dict)
    missing: list[Decoding] = field(default_factory=list)

    def run(self, decodings: Sequence[Decoding], start: Start, order: str) -> None:
        """Measure.

        Args:
            decodings: plain vLLM first; those with a fault are missing.
            start: starts the engine of a way of decoding.
            order: of ORDERS.

        Raises:
            EngineFailed: plain vLLM failed; without it nothing can be compared.
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

    def _measure_group(self, decodings: Sequence[Decoding], start: Start, bar: Bar) -> None:
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

        with contextlib.ExitStack() as stack:
            for decoding in decodings:
                bar.set_postfix_str(f"starting {decoding.name}")
                with may_fail(decoding):
                    client = clients[decoding] = stack.enter_context(start(decoding))
                    self.greedy[decoding] = complete_greedy(client, self._choose(0, CHECKED), self.loads[0].max_tokens)
            for turn, load in itertools.product(range(self.rounds), self.loads):
                chosen = self._choose(turn * load.prompts, load.prompts)
                for decoding in list(clients)[:: -1 if turn % 2 else 1]:
                    with may_fail(decoding):
                        one = measure(clients[decoding], load, chosen)
                        self.passes.append(Pass(decoding, load, turn, one))
                        rate, step = one.tokens_per_second, one.acceptance.tokens_per_step
                        bar.set_postfix_str(f"{decoding.name}, {load.name}: {rate:.1f} tok/s, {step:.2f} tokens/step")
                        bar.update()

    def _choose(self, first: int, count: int) -> list[Prompt]:
        return list(itertools.islice(itertools.cycle(self.prompts), first, first + count))
