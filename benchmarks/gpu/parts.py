"""Parts of a stage of the GPU programme, and their environment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_mtpc.engine import provenance


@dataclass(frozen=True)
class Part:
    """A command of a stage."""

    name: str
    seconds: float  # expected time on an H200; it starts only if enough time is left
    command: Sequence[str]
    result: Path | None = None  # JSON that the command writes
    needs: Sequence[Path] = ()  # files of earlier stages or parts
    environment: dict[str, str] = field(default_factory=dict)
    proof: str | None = None  # a pattern that the log must have: without it nothing was compared
    makes: Path | None = None  # a model or data in the cache: of use at other commits too, made again where it is gone


@dataclass(frozen=True)
class Programme:
    """Where it runs: in full on a GPU, or at toy size on a CPU. ``engine``: more arguments of every engine."""

    is_toy: bool = False
    engine: dict[str, Any] = field(default_factory=dict)

    @property
    def cache(self) -> Path:
        return Path(os.environ.get("MTPC_GPU_CACHE") or ("build/gpu-toy" if self.is_toy else "build/gpu"))

    @property
    def results(self) -> Path:
        return Path(os.environ.get("OUT") or (self.cache if self.is_toy else provenance.RESULTS))

    def size(self, full: Any, toy: Any) -> Any:
        return toy if self.is_toy else full
