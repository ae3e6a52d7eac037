"""What a rehearsal finds: the kind, the phase and the place in the code."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass

# A user notices these in every phase: the engine does not start, or starts only on some installations.
ALWAYS = ("device", "type", "nvrtc", "graph")
SERVING = ("step", "in graph")
OWN = ("/proposers/", "/vllm_mtpc/", "/kernels/")
HIDDEN = ("/torch/", "/tests/gpu_rehearsal/")
DEEPEST = 60  # frames that are looked at


@dataclass(frozen=True)
class Finding:
    """One kind of event at one place.

    Attributes:
        phase: "load", "profile", "capture", "step" and others; "in graph" while a CUDA graph is captured.
        kind: "device", "type", "wait", "pageable copy", "compile", "nvrtc" or "graph" (of what a graph cannot hold).
        what: the operation.
        where: the innermost frame, then up to two frames of this package.
        ours: whether a frame is of this package.
    """

    phase: str
    kind: str
    what: str
    where: str
    ours: bool

    @property
    def matters(self) -> bool:
        return self.kind in ALWAYS or self.phase in SERVING


class Notes:
    """The findings of a run, with their number."""

    def __init__(self) -> None:
        self.phase, self.found = "import", Counter[Finding]()

    def add(self, kind: str, what: str, ours: bool | None = None) -> None:
        """Note an event here; `ours`: whose it is, by default this package's if one of its frames is in the stack."""
        frames, frame = list[tuple[str, int]](), sys._getframe(1)
        while frame is not None and len(frames) < DEEPEST:
            frames.append((frame.f_code.co_filename, frame.f_lineno))
            frame = frame.f_back
        frames = [one for one in reversed(frames) if not any(part in one[0] for part in HIDDEN)]
        own = [one for one in frames if any(part in one[0] for part in OWN) and "/site-packages/" not in one[0]]
        shown = frames[-1:] + [one for one in own[-2:] if one is not frames[-1]]
        where = " < ".join(f"{_short(file)}:{line}" for file, line in shown)
        self.found[Finding(self.phase, kind, what, where, bool(own) if ours is None else ours)] += 1


def _short(filename: str) -> str:
    return "/".join(filename.split("site-packages/")[-1].split("/")[-4:])


NOTES = Notes()  # of this process: what replaces torch.cuda has no other way to reach it
