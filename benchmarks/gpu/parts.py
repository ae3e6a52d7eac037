"""Parts of a stage of the GPU programme: their environment, and the command lines that several stages share."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm_mtpc.engine import provenance

MTPC = [sys.executable, "-m", "vllm_mtpc"]
ALL_DRAFTS = {"num_speculative_tokens_per_batch_size": "off"}


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


def words(*given: Any, **options: Any) -> list[str]:
    """Words of a command line; options by name, lists as several words, None left out."""
    found = [str(word) for word in given]
    for name, value in options.items():
        if value is not None:
            found += [f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, list | tuple) else [value])]
    return found


def bench_serve(
    programme: Programme,
    name: str,
    seconds: float,
    needs: Sequence[Path] = (),
    environment: dict[str, str] | None = None,
    engine: dict[str, Any] | None = None,
    peers: Sequence[str] = (),
    **options: Any,
) -> Part:
    """`vllm-mtpc bench serve`, on the model runner that vLLM chooses."""
    out = programme.cache / "serve" / f"{name}.json"
    common = {"engine": json.dumps({**(engine or {}), **programme.engine}), "rounds": 1, "json": out}
    common["logs"] = out.with_suffix("")
    command = words(*MTPC, "bench", "serve", peers=list(peers), **{**common, **options})
    return Part(name, seconds, command, out, needs, environment or {})


def windowed(programme: Programme, name: str, seconds: float, cache_gib: int = 2, **options: Any) -> Part:
    """The same options by `benchmarks.gpu.window`: all engines at once, each with so much KV cache."""
    size = {"kv_cache_memory_bytes": programme.size(cache_gib << 30, 256 << 20), "gpu_memory_utilization": 0.05}
    given = {**options, "engine": {**size, **options.get("engine", {})}}
    part = bench_serve(programme, name, seconds, **given)
    until = programme.size(seconds - 20, None)  # the last pass and the ends of engines take the rest
    program = words(sys.executable, "-m", "benchmarks.gpu.window", until=until)
    return replace(part, command=[*program, *part.command[part.command.index("serve") :]])
