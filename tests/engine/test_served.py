"""Servers as child processes and their failures, their counters, and passes of `vllm bench serve`."""

from __future__ import annotations

import os
import re
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from vllm.v1.metrics import loggers

from vllm_mtpc.engine.served import Load, complete_greedy, measure
from vllm_mtpc.engine.server import API_KEY, Acceptance, VllmServer, run_server
from vllm_mtpc.errors import EngineFailed

PROMETHEUS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="demo"} 10.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="demo"} 1.76e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="demo"} 30.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="demo"} 15.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="demo",position="0"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="demo",position="1"} 5.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="demo",position="2"} 1.0
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",model_name="demo",position="2"} 1.76e+09
vllm:generation_tokens_total{engine="0",model_name="demo"} 25.0
vllm:ratio{engine="0",model_name="demo"} NaN
"""
ALL_STEPS = """\
vllm_mtpc:spec_decode_steps_total{engine="0",model_name="demo"} 60.0
vllm_mtpc:spec_decode_drafts_pruned_total{by="schedule",engine="0",model_name="demo"} 80.0
vllm:spec_decode_steps_total{engine="0",model_name="demo"} 60.0
vllm:spec_decode_drafts_pruned_total{by="schedule",engine="0",model_name="demo"} 80.0
"""
OUTPUTS = """\
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="demo"} 4.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="demo"} 4.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="demo"} 0.5
# TYPE vllm:inter_token_latency_seconds histogram
vllm:inter_token_latency_seconds_bucket{engine="0",le="+Inf",model_name="demo"} 26.0
vllm:inter_token_latency_seconds_count{engine="0",model_name="demo"} 26.0
vllm:inter_token_latency_seconds_sum{engine="0",model_name="demo"} 1.5
"""
LOAD = Load(clients=2, temperature=0.0, max_tokens=4, prompts=3)


def test_counters_are_read_and_subtracted() -> None:
    read = Acceptance.read(PROMETHEUS)
    assert read == Acceptance(10, 30, 15, (9, 5, 1))
    assert read.tokens_per_step == 2.5 and read.per_position == (0.9, 0.5, 0.1)
    both = Acceptance.read(PROMETHEUS + PROMETHEUS.replace('engine="0"', 'engine="1"'))
    assert both == Acceptance(20, 60, 30, (18, 10, 2)) == read + read
    assert both - read == read - Acceptance() == read


@pytest.mark.parametrize(
    ("metrics", "steps", "tokens_per_step"),
    [
        (PROMETHEUS + ALL_STEPS, 60, 1.25),  # ten of sixty steps drafted
        (PROMETHEUS + OUTPUTS, 30, 1.5),  # other methods do not count their steps
        (PROMETHEUS + OUTPUTS + ALL_STEPS, 60, 1.25),
        (OUTPUTS, 0, 1.0),  # plain vLLM
    ],
)
def test_tokens_per_step_is_over_all_steps(metrics: str, steps: int, tokens_per_step: float) -> None:
    read = Acceptance.read(metrics)
    assert (read.steps, read.tokens_per_step, (read + read).tokens_per_step) == (
        steps,
        tokens_per_step,
        tokens_per_step,
    )
    assert read.tokens_per_drafted_step == (2.5 if read.drafts else 1.0)
    names = set(re.findall(r'"(vllm:\w+)"', Path(loggers.__file__).read_text(encoding="utf-8")))
    assert {"vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"} <= names  # as the installed vLLM


class FakeClient:
    """A server whose counters grow by three accepted drafts in four steps from one reading to the next."""

    url, process = "http://localhost:1", SimpleNamespace(pid=os.getpid())

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.counted = Acceptance()

    def complete(self, body: dict[str, Any]) -> list[list[int]]:
        self.bodies.append(body)
        return [[len(prompt)] for prompt in body["prompt"]]

    def acceptance(self) -> Acceptance:
        self.counted += Acceptance(4, 8, 3, (3,), steps=4)
        return self.counted


@pytest.mark.parametrize("completed", [3, 2])
def test_pass_sends_the_prompts_in_its_setting(monkeypatch: pytest.MonkeyPatch, completed: int) -> None:
    sent = SimpleNamespace()

    def bench_serve(args: Namespace) -> dict[str, Any]:
        sent.args, sent.prompts = args, Path(args.dataset_path).read_text()
        times = {"ttfts": [0.1, 0.2, 0.3], "latencies": [0.4, 0.8, 0.9], "output_lens": [4, 4, 4]}
        errors = ["", "Traceback\nrefused", ""]
        return {"completed": completed, "duration": 2.0, "total_output_tokens": 12, "errors": errors, **times}

    monkeypatch.setattr("vllm.benchmarks.serve.main", bench_serve)
    client = FakeClient()
    if completed < 3:
        with pytest.raises(EngineFailed, match="answered 2 of 3 requests of T=0, c=2: refused"):
            measure(client, LOAD, ["a", [7, 8], "b"])
        return
    found = measure(client, LOAD, ["a", [7, 8], "b"])
    assert sent.prompts == '{"prompt": "a"}\n{"prompt": [7, 8]}\n{"prompt": "b"}\n'
    assert (sent.args.max_concurrency, sent.args.temperature, sent.args.base_url) == (2, 0.0, client.url)
    assert sent.args.extra_body == {"max_tokens": 4, "ignore_eos": True} and sent.args.save_detailed
    assert (found.tokens_per_second, found.acceptance.tokens_per_step) == (6.0, 1.75)
    assert (found.ttft_ms, found.tpot_ms) == (200.0, 200.0)
    assert complete_greedy(client, ["a", "bc"], 4) == [[1], [1], [2]]  # a prompt alone, and all together
    assert [body["prompt"] for body in client.bodies] == [["a", [7, 8]], ["a"], ["a", "bc"]]  # after the warm-up
    assert [body["temperature"] for body in client.bodies[1:]] == [0.0, 0.0]


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_server_that_is_not_healthy_in_time_is_stopped() -> None:
    server = VllmServer([], program=[sys.executable, "-c", "import time; time.sleep(60)"])
    with pytest.raises(EngineFailed, match="was not healthy after 1 s"):
        server.start(timeout_s=0.6)
    with pytest.raises(EngineFailed, match="ended with exit code"):
        server.check_running()


def test_stop_ends_processes_that_ignore_sigterm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grandchild = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    code = (
        f"import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', {grandchild!r}], "
        "stdout=subprocess.PIPE); p.stdout.readline(); print('grandchild', p.pid, flush=True); time.sleep(60)"
    )
    log = tmp_path / "log"
    server = VllmServer([], program=[sys.executable, "-c", code], log=log)
    monkeypatch.setattr(VllmServer, "is_healthy", lambda _: log.read_text().endswith("\n"))
    server.start(timeout_s=60)
    pid = int(log.read_text().split()[-1])
    assert is_running(pid)
    server.stop()
    assert not is_running(pid)


def test_server_that_ends_is_reported_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY, "sesame")
    executable = tmp_path / "python"
    executable.write_text(f'#!/bin/sh\necho "no such model [${API_KEY}]"\nexit 7\n')
    executable.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(executable))
    failure = pytest.raises(EngineFailed, match=r"(?s)exit code 7.*no such model \[\]")  # nor a key
    with failure, run_server(["x"], tmp_path / "log"):
        pass
