"""Engines of a comparison: the same settings for every way of decoding, offline or behind HTTP."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vllm_mtpc.bench import serve
from vllm_mtpc.bench.decodings import Decoding
from vllm_mtpc.engine.options import flags
from vllm_mtpc.engine.passes import Prompt, Resident, launched

CPU_CACHE_BYTES = 256 << 20  # of KV cache for each engine: several are alive at once
Engine = Resident | serve.Served


def arguments(
    target: str, dtype: str, max_model_len: int, max_num_seqs: int, on_gpu: bool, more: dict[str, Any]
) -> dict[str, Any]:
    """Keyword arguments of ``vllm.LLM`` that every engine of a run gets; ``more`` wins."""
    on_cpu = {} if on_gpu else {"enforce_eager": True, "kv_cache_memory_bytes": CPU_CACHE_BYTES}
    return {
        "model": target,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "enable_prefix_caching": False,  # a prompt that comes again is read again
        "seed": 0,
        **on_cpu,
        **more,
    }


@contextlib.contextmanager
def start(
    decoding: Decoding, engine: dict[str, Any], prompts: Sequence[Prompt], logs: Path, over_http: bool
) -> Iterator[Engine]:
    """The engine of a way of decoding, ready. Raises EngineFailed where it does not start."""
    speculative = {} if decoding.is_plain else {"speculative_config": decoding.speculative}
    place = "".join(letter if letter.isalnum() else "-" for letter in f"{decoding.name}-{decoding.group}")
    log = logs / f"{place}.log"
    if not over_http:
        with launched({**engine, **speculative}, prompts, log, decoding.environment) as waiting:
            _ = waiting.about  # waits until it is ready
            yield waiting
        return
    with serve.server(command({**engine, **speculative}), log, environment=decoding.environment) as client:
        yield serve.Served(client, prompts)


def command(engine: dict[str, Any]) -> list[str]:
    """Keyword arguments of ``vllm.LLM`` as words of ``vllm serve``."""
    return [str(engine["model"]), *flags({key: value for key, value in engine.items() if key != "model"})]
