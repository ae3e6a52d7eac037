"""Measure several ways of decoding so that a machine whose speed drifts does not decide the comparison.

Interleaved (engines that fit on the machine together, as on a CPU): all engines run, and one measures at a time. Every
round runs each setting on all engines, every second round in the opposite order; speed-ups are those of a round.
Bracketed (an engine needs the whole GPU): one engine after the other, plain vLLM first and last; speed-ups are over
the mean of its passes.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from statistics import fmean

from vllm_mtpc.bench.decodings import Decoding, Missing
from vllm_mtpc.engine.served import Measured, Prompt, Setting, complete_greedy, measure
from vllm_mtpc.engine.server import Client
from vllm_mtpc.errors import EngineFailed
from vllm_mtpc.progress import Bar

Start = Callable[[Decoding], AbstractContextManager[Client]]
CHECKED = 8  # prompts of the greedy check
ORDERS = {
    "interleaved": "every round runs each setting on all engines in turn, each second round in the opposite order; "
    "speed-up: over plain's pass of the same round, median of the rounds (least and most).",
    "bracketed": "one engine after the other, plain first and last; speed-up: over the mean of plain's passes, median "
    "of the rounds (least and most).",
}


@dataclass
class Pass:
    """One pass of a way of decoding; `baseline`: tokens/s of plain vLLM that it is compared with."""

    decoding: Decoding
    cell: Setting
    round: int
    measured: Measured
    baseline: float = 0.0

    @property
    def speedup(self) -> float:
        return self.measured.tokens_per_second / self.baseline


@dataclass
class Comparison:
    """Passes of a run, greedy answers, and ways of decoding that could not run."""

    passes: list[Pass] = field(default_factory=list)
    greedy: dict[Decoding, list[list[int]]] = field(default_factory=dict)
    missing: list[Missing] = field(default_factory=list)

    def identical(self, decoding: Decoding) -> tuple[int, int] | None:
        """Return how many greedy answers equal those of plain vLLM, and their number."""
        plain = next((found for one, found in self.greedy.items() if one.is_plain), [])
        if decoding.is_plain or decoding not in self.greedy:
            return None
        return sum(mine == its for mine, its in zip(self.greedy[decoding], plain, strict=True)), len(plain)


def compare(
    decodings: Sequence[Decoding],
    cells: Sequence[Setting],
    prompts: Sequence[Prompt],
    rounds: int,
    start: Start,
    order: str,
) -> Comparison:
    """Measure every setting with every way of decoding.

    Args:
        decodings: plain vLLM first.
        cells: settings.
        prompts: of all rounds; every round has other ones, and they repeat if there are too few.
        rounds: passes of an engine in every setting.
        start: starts the engine of a way of decoding.
        order: of ORDERS.

    Raises:
        EngineFailed: plain vLLM failed; without it nothing can be compared.
    """
    found = Comparison()
    together = order == "interleaved"
    groups = [decodings] if together else [[one] for one in (*decodings, decodings[0])]
    with Bar(total=sum(map(len, groups)) * rounds * len(cells), desc="passes", unit="pass") as bar:
        for group in groups:
            _measure_group(group, cells, prompts, rounds, start, found, bar)
    plain = [one for one in found.passes if one.decoding.is_plain]
    for one in found.passes:
        alike = [other for other in plain if other.cell == one.cell and (other.round == one.round or not together)]
        one.baseline = fmean(other.measured.tokens_per_second for other in alike)
    return found


def _measure_group(
    decodings: Sequence[Decoding],
    cells: Sequence[Setting],
    prompts: Sequence[Prompt],
    rounds: int,
    start: Start,
    into: Comparison,
    bar: Bar,
) -> None:
    clients: dict[Decoding, Client] = {}

    @contextlib.contextmanager
    def may_fail(decoding: Decoding) -> Iterator[None]:
        try:
            yield
        except EngineFailed as error:
            if decoding.is_plain:
                raise
            clients.pop(decoding, None)
            into.missing.append(Missing(decoding.name, f"its engine failed: {error.reason}", decoding.is_required))

    def choose(first: int, count: int) -> list[Prompt]:
        return list(itertools.islice(itertools.cycle(prompts), first, first + count))

    with contextlib.ExitStack() as stack:
        for decoding in decodings:
            bar.set_postfix_str(f"starting {decoding.name}")
            with may_fail(decoding):
                clients[decoding] = stack.enter_context(start(decoding))
                into.greedy[decoding] = complete_greedy(clients[decoding], choose(0, CHECKED), cells[0].max_tokens)
        for turn, cell in itertools.product(range(rounds), cells):
            for decoding in list(clients)[:: -1 if turn % 2 else 1]:
                with may_fail(decoding):
                    one = measure(clients[decoding], cell, choose(turn * cell.prompts, cell.prompts))
                    into.passes.append(Pass(decoding, cell, turn, one))
                    rate, step = one.tokens_per_second, one.acceptance.tokens_per_step
                    bar.set_postfix_str(f"{decoding.name}, {cell.name}: {rate:.1f} tok/s, {step:.2f} tokens/step")
                    bar.update()
