"""`vllm serve --data-parallel-size 2` with a head: both engines draft, and every answer is plain vLLM's."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.engine import Call, Engine, run
from tests.e2e.test_faults import WORDS
from vllm_mtpc import demo
from vllm_mtpc.bench import serve

PROMPTS = [list(text) for text in (b"import os\n", b"def read(path):\n    ", b"class Node:\n", b"for i in range(")] * 2
GREEDY = {"temperature": 0.0, "max_tokens": 48, "ignore_eos": True}
ENGINES = ("0", "1")


def accepted(text: str) -> dict[str, float]:
    """Accepted drafts by engine."""
    found = re.findall(r'^vllm:spec_decode_num_accepted_tokens_total\{engine="(\d)".*\} (\S+)$', text, re.MULTILINE)
    return {engine: float(value) for engine, value in found}


@pytest.mark.slow
def test_two_engines(tmp_path: Path) -> None:
    words = [*WORDS, "--data-parallel-size", "2", "--api-server-count", "1"]
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    with serve.server(words, tmp_path / "log", 1200, environment) as client:
        model = client.model()
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            bodies = [{"model": model, "prompt": prompt, **GREEDY} for prompt in PROMPTS]
            said = [answer.tokens for answer in pool.map(client.complete, bodies)]
        counted = accepted(client.get("/metrics", timeout_s=30)[1])
    engine = Engine(str(demo.path("target")), [Call(PROMPTS, [GREEDY] * len(PROMPTS))], {"max_model_len": 256})
    plain = run({"plain": engine}, "v1")["plain"]
    assert not isinstance(plain, str), plain
    assert [[tokens] for tokens in said] == plain[0].tokens
    assert counted.keys() == set(ENGINES) and min(counted.values()) > 0
