"""When a run saves its state before its last step: every so many minutes, and when it is told to end.

SIGTERM and SIGINT let the step at hand end; another one ends the process at once. All processes of a run save and end
after the same step, whichever of them was told. Ray Train runs the loop of its workers in a thread, which gets no
signals, and ends workers itself: there the minutes alone decide.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from typing import Self

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAME_SECONDS = 2.0  # a signal to all processes reaches those of torchrun twice, the second time from its agent


class Stopping:
    """A context for a training loop: `due` is asked after each step, `saved` told of each state."""

    def __init__(self, minutes: float, processes: int) -> None:
        self.signal = 0  # that all processes end for
        self._told, self._told_at = 0, 0.0  # of this process
        self._seconds, self._saved_at = 60 * minutes, time.monotonic()
        # On the host whatever the device: asking it does not wait for the device.
        self._group = dist.new_group(backend="gloo") if processes > 1 else None

    def __enter__(self) -> Self:
        self._before = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._tell) for number in SIGNALS}
        return self

    def __exit__(self, *_error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _tell(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._told:
            self._told, self._told_at = number, now
            text = f"\n{signal.Signals(number).name}: ending after this step; again: at once, without saving\n"
            os.write(2, text.encode())  # a print may be under way
        elif now - self._told_at > SAME_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def due(self) -> bool:
        """Whether the state is to be saved after this step; the same in all processes, as is `signal` then."""
        wanted = [int(time.monotonic() - self._saved_at >= self._seconds), self._told]
        if self._group is not None:
            flags = torch.tensor(wanted)
            dist.all_reduce(flags, dist.ReduceOp.MAX, self._group)
            wanted = flags.tolist()
        self.signal = wanted[1]
        return any(wanted)

    def saved(self) -> None:
        """The minutes start anew."""
        self._saved_at = time.monotonic()
