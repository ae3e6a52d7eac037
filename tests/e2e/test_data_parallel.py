"""`vllm serve --data-parallel-size 2` with a head: both engines draft, and every answer is plain vLLM's."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support import forks
from tests.support.engine import Call, Engine, run
from vllm_mtpc import demo
from vllm_mtpc.engine import server

PROMPTS = [list(text) for text in (b"import os\n", b"def read(path):\n    ", b"class Node:\n", b"for i in range(")] * 2
GREEDY = {"temperature": 0.0, "max_tokens": 48, "ignore_eos": True}
ENGINES = ("0", "1")
CASES = {"v1": ("v1", "mtpc", "btree"), "v2": ("v2", "mtpc", "btree"), "ptp": ("v2", "ptp", "o-ptp")}
ON = {"v1": "mtpc on V1", "v2": "mtpc on V2", "ptp": "ptp on V2"}  # columns of benchmarks/FEATURES.md


def accepted(text: str) -> dict[str, float]:
    """Accepted drafts by engine."""
    found = re.findall(r'^vllm:spec_decode_num_accepted_tokens_total\{engine="(\d)".*\} (\S+)$', text, re.MULTILINE)
    return {engine: float(value) for engine, value in found}


def words(method: str, head: str) -> list[str]:
    """Of `vllm serve` with two engines."""
    speculative = json.dumps({"method": method, "model": str(demo.path(head))})
    size = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--kv-cache-memory-bytes", str(1 << 26)]
    two = ["--data-parallel-size", "2", "--api-server-count", "1"]
    return [str(demo.path("target")), *size, "--max-num-seqs", "4", "--speculative-config", speculative, *two]


@pytest.mark.feature("data parallel", "exact")
@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.column(ON[case])) for case in CASES])
def test_both_data_parallel_engines_draft(case: str, tmp_path: Path) -> None:
    runner, method, head = CASES[case]
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", **forks.ENVIRONMENTS[runner]}
    with server.run_server(words(method, head), tmp_path / "log", environment) as client:
        model = client.model()
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            bodies = [{"model": model, "prompt": prompt, **GREEDY} for prompt in PROMPTS]
            outputs = [answer.tokens for answer in pool.map(client.complete, bodies)]
        counted = accepted(client.get("/metrics", timeout_s=30)[1])
    engine = Engine(str(demo.path("target")), [Call(PROMPTS, [GREEDY] * len(PROMPTS))], {"max_model_len": 256})
    plain = run({"plain": engine}, runner)["plain"]
    assert [[tokens] for tokens in outputs] == plain[0].tokens
    assert counted.keys() == set(ENGINES) and min(counted.values()) > 0
