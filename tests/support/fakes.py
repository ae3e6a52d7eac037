"""Engines that do not run: each pass takes the time and gives the tokens that a test asks for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from vllm_mtpc.bench.decodings import Decoding
from vllm_mtpc.engine.counters import Acceptance
from vllm_mtpc.engine.served import Measured, Setting
from vllm_mtpc.errors import EngineFailed

GREEDY = Setting(1, 0.0, 4, 2)
SAMPLED = Setting(1, 1.0, 4, 2)


def decoding(name: str, method: str | None = "mtpc") -> Decoding:
    return Decoding(name, None if method is None else {"method": method}, is_required=method == "mtpc")


PLAIN, NGRAM, BTREE = decoding("plain", None), decoding("ngram", "ngram"), decoding("btree")


def measured(seconds: float, **more: Any) -> Measured:
    """Eight tokens, three of them accepted drafts, in four steps of a request."""
    acceptance = Acceptance(3, 6, 3, (2, 1), steps=4)
    return Measured(seconds, 8, **{"acceptance": acceptance, "ttft_ms": 20.0, "tpot_ms": 5.0, **more})


class Engines:
    """Starts fake engines; `seconds(name, setting, pass)` is the duration of a pass, and may raise.

    wrong: greedy answers that differ from plain's, by engine. cannot_start: names of engines that fail.
    """

    def __init__(self, seconds: Callable[[str, Setting, int], float]) -> None:
        self.seconds = seconds
        self.wrong: dict[str, int] = {}
        self.log: list[tuple[str, ...]] = []
        self.cannot_start: set[str] = set()

    @contextlib.contextmanager
    def start(self, decoding: Decoding) -> Iterator[Any]:
        if decoding.name in self.cannot_start:
            raise EngineFailed("ended with exit code 1; the end of its log:\nValueError: no such model\n  at the end")
        self.log.append(("start", decoding.name))
        yield _Engine(self, decoding.name)
        self.log.append(("end", decoding.name))


class _Engine:
    def __init__(self, engines: Engines, name: str) -> None:
        self.engines, self.name, self.passes = engines, name, 0

    def complete_greedy(self, setting: Setting, count: int) -> list[list[int]]:
        wrong = self.engines.wrong.get(self.name, 0)
        return [[number, 99 if number < wrong else 3] for number in range(count)]

    def measure(self, setting: Setting) -> Measured:
        self.engines.log.append((self.name, setting.name, str(setting.first)))
        self.passes += 1
        return measured(self.engines.seconds(self.name, setting, self.passes - 1))
