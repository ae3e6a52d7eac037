"""Who runs when, so that a machine that drifts does not decide.

Interleaved (where all engines fit at once, as on a CPU): all are alive, one measures at a time. In every round each
setting is run by all of them, one right after the other, every second round in the opposite order; a pass is compared
with plain's pass of the same round and setting. Bracketed (where an engine takes the whole GPU): one engine at a time,
plain first and last; a pass is compared with the mean of plain's passes, those before and those after.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from statistics import fmean

from tqdm import tqdm

from vllm_mtpc.bench.decodings import Decoding, Engine, Missing
from vllm_mtpc.engine.passes import Measured, Setting
from vllm_mtpc.errors import EngineFailed

Start = Callable[[Decoding], AbstractContextManager[Engine]]
HOW = {
    "interleaved": "every round runs each setting on all engines in turn, each second round in the opposite order; "
    "speed-up: by plain's pass of the same round, median of the rounds (least and most).",
    "bracketed": "one engine after the other, plain before and after; speed-up: by the mean of plain's passes before "
    "and after, median of the rounds (least and most).",
}


@dataclass(frozen=True)
class Pass:
    """One measurement: who, which cell (its setting without the choice of prompts), which round."""

    decoding: Decoding
    cell: Setting
    round: int
    measured: Measured
    plain: Measured | None = None  # what its output is compared with; None for plain itself
    baseline: float = 0.0  # tok/s of plain that its speed is compared with
    runner: str = ""  # the model runner, as its engine says
    kv_cache_bytes: int | None = None  # left for the KV cache, as an engine on a GPU says

    @property
    def speedup(self) -> float:
        return self.measured.tokens_per_second / self.baseline


@dataclass
class Progress:
    """A bar on a terminal, lines elsewhere, both with the time left by the passes so far and by the deadline."""

    total: int
    deadline: float | None = None  # time.monotonic()

    def __post_init__(self) -> None:
        self.started = time.monotonic()
        self.bar = tqdm(total=self.total, unit="pass", file=sys.stderr, disable=not sys.stderr.isatty())
        self.done, self.working = 0, 0.0

    @property
    def left(self) -> float:
        """Seconds, infinite before the first pass; starts of engines are not foreseen."""
        by_passes = self.working / self.done * (self.total - self.done) if self.done else float("inf")
        return by_passes if self.deadline is None else max(0.0, min(by_passes, self.deadline - time.monotonic()))

    def say(self, text: str) -> None:
        left = f", about {self.left:.0f} s left" if self.left < float("inf") else ""
        tqdm.write(f"[{time.monotonic() - self.started:4.0f} s{left}] {text}", file=sys.stderr)

    def passed(self, one: Pass, seconds: float) -> None:
        self.done += 1
        self.working += seconds
        self.bar.update()
        rate, step = one.measured.tokens_per_second, one.measured.tokens_per_step
        where = f"T={one.cell.temperature:g} c={one.cell.clients}"
        self.say(f"{where:9} {one.decoding.name:22} {rate:8.1f} tok/s {step:5.2f} tokens/step")

    def skip(self, passes: int) -> None:
        self.total -= passes
        self.bar.total = self.total
        self.bar.refresh()


@dataclass
class Comparison:
    """The passes of a run as they come, and what could not be run."""

    progress: Progress
    passes: list[Pass] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)
    made: Counter[str] = field(default_factory=Counter)  # passes by the name of the decoding

    def measure(self, engine: Engine, decoding: Decoding, cell: Setting, round_: int) -> Pass:
        begun = time.monotonic()
        found = engine.measure(replace(cell, first=round_ * cell.prompts))
        runner, cache_bytes = engine.about["runner"], engine.about.get("kv_cache_bytes")
        one = Pass(decoding, cell, round_, replace(found, setting=cell), runner=runner, kv_cache_bytes=cache_bytes)
        self.made[decoding.name] += 1
        self.progress.passed(one, time.monotonic() - begun)
        return one

    def gave_up(self, decoding: Decoding, error: EngineFailed, planned: int) -> None:
        """A row less, of ``planned`` passes; without plain there is nothing to compare with."""
        if decoding.is_plain:
            raise error
        self.progress.skip(planned - self.made[decoding.name])
        self.missing.append(Missing(decoding.name, f"its engine failed: {error.reason}", decoding.is_ours))
        self.progress.say(f"{decoding.name}: {error}")


def interleaved(
    decodings: Sequence[Decoding], cells: Sequence[Setting], rounds: int, start: Start, into: Comparison
) -> None:
    """``decodings`` begin with plain. No round but the first is begun that would not end before the deadline."""
    planned = rounds * len(cells)
    with contextlib.ExitStack() as stack:
        engines: dict[Decoding, Engine] = {}
        for decoding in decodings:
            try:
                engines[decoding] = stack.enter_context(start(decoding))
            except EngineFailed as error:
                into.gave_up(decoding, error, planned)
        longest = 0.0
        for round_ in range(rounds):
            begun = time.monotonic()
            if round_ and begun + longest > (into.progress.deadline or float("inf")):
                into.progress.say(f"{round_} rounds: another would not end in time")
                into.progress.skip((rounds - round_) * len(engines) * len(cells))
                return
            for cell in cells:
                into.passes += _turn(engines, cell, round_, planned, into)
            longest = max(longest, time.monotonic() - begun)


def _turn(engines: dict[Decoding, Engine], cell: Setting, round_: int, planned: int, into: Comparison) -> list[Pass]:
    """One setting on all engines, plain's pass first; one that fails is left out from now on."""
    found = []
    for decoding in list(engines)[:: -1 if round_ % 2 else 1]:
        try:
            found.append(into.measure(engines[decoding], decoding, cell, round_))
        except EngineFailed as error:
            into.gave_up(decoding, error, planned)
            del engines[decoding]
    found.sort(key=lambda one: not one.decoding.is_plain)
    plain, rate = found[0].measured, found[0].measured.tokens_per_second
    return [replace(one, plain=None if one.decoding.is_plain else plain, baseline=rate) for one in found]


def bracketed(
    decodings: Sequence[Decoding], cells: Sequence[Setting], rounds: int, start: Start, into: Comparison
) -> None:
    """``decodings`` begin with plain, which runs once more at the end."""
    found: list[Pass] = []
    for place, decoding in enumerate([*decodings, decodings[0]]):
        base = rounds if place == len(decodings) else 0  # plain's second passes are further rounds of its own
        try:
            with start(decoding) as engine:
                for cell in cells:
                    for round_ in range(rounds):
                        one = into.measure(engine, decoding, cell, round_)
                        found.append(replace(one, round=base + round_))
        except EngineFailed as error:
            into.gave_up(decoding, error, rounds * len(cells))
    for one in found:
        plain = [other for other in found if other.decoding.is_plain and other.cell == one.cell]
        same = None if one.decoding.is_plain else next(p.measured for p in plain if p.round == one.round)
        rate = fmean(other.measured.tokens_per_second for other in plain)
        into.passes.append(replace(one, plain=same, baseline=rate))
