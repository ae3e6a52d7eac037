"""Engines that do not run: each pass takes the time and gives the tokens that a test asks for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from vllm_mtpc.bench.decodings import OWN, Decoding
from vllm_mtpc.engine.counters import Acceptance
from vllm_mtpc.engine.passes import Answer, Measured, Setting
from vllm_mtpc.engine.steps import Steps
from vllm_mtpc.errors import EngineFailed

GREEDY = Setting("T=0, c=1", 1, 0.0, 4, 2)
SAMPLED = Setting("T=1, c=1", 1, 1.0, 4, 2)


def decoding(name: str, method: str | None = "mtpc", group: str = OWN) -> Decoding:
    return Decoding(name, None if method is None else {"method": method}, group=group)


PLAIN, NGRAM, BTREE = decoding("plain", None), decoding("ngram", "ngram"), decoding("btree")


def measured(setting: Setting, seconds: float, wrong: int = 0, **more: Any) -> Measured:
    """Two answers of four tokens; ``wrong`` of them are not plain's."""
    outputs = [[setting.first, 1, 2, 3], [setting.first, 5, 6, 7]]
    for answer in outputs[:wrong]:
        answer[-1] = 99
    answers = [Answer(text, output, 0.02, 0.005) for text, output in zip("ab", outputs, strict=True)]
    values = {"acceptance": Acceptance(3, 6, 3, (2, 1)), "steps": Steps(4, 4, 10, 2.0, 1.5, 0.5), **more}
    return Measured(setting, seconds, answers, **values)


class Engines:
    """Starts of fake engines; ``seconds(name, setting, pass)`` is what a pass takes, an exception: it fails."""

    def __init__(self, seconds: Callable[[str, Setting, int], float], wrong: dict[str, int] | None = None) -> None:
        self.seconds, self.wrong = seconds, wrong or {}
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
        self.engines, self.name, self.passes, self.about = engines, name, 0, {"runner": "none"}

    def measure(self, setting: Setting) -> Measured:
        self.engines.log.append((self.name, setting.name, str(setting.first)))
        seconds = self.engines.seconds(self.name, setting, self.passes)
        self.passes += 1
        return measured(setting, seconds, self.engines.wrong.get(self.name, 0))
