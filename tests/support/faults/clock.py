"""A clock that jumps, in the process of an engine."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from tests.support import engine

JUMPS = (0.0, 3600.0, -3600.0, 86400.0)  # seconds by which it is wrong, one after the other
CLOCKS = ("time", "monotonic", "perf_counter")


def jumps() -> Callable[[], None]:
    """Wall clock and monotonic clocks go an hour forward, stand still, and go back; one look in ten is after a jump.

    Notes what `perf_counter` said, from which costs are learnt.
    """
    chance, real = random.Random(0), {name: getattr(time, name) for name in CLOCKS}
    wrong, last = [0.0], dict.fromkeys(CLOCKS, 0.0)

    def look(name: str) -> float:
        if chance.random() < 0.1:
            wrong[0] = chance.choice(JUMPS)
        if not last[name] or chance.random() < 0.9:  # else it stands still
            last[name] = real[name]() + wrong[0]
        if name == "perf_counter":
            engine.RECORDED.append(last[name])
        return last[name]

    undo = [engine.replaced(time, name, lambda name=name: look(name)) for name in CLOCKS]
    return lambda: [one() for one in undo] and None


INJECTED = {"clock jumps": jumps}
