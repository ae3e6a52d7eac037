"""What goes wrong around an engine that drafts: a process of it dies, its clock jumps, its KV cache is too small.

A dead process fails requests with an error and ends the server: nothing hangs. The others change no greedy token.
"""

from __future__ import annotations

import http.client
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest

from benchmarks.child_process import tail
from tests.support.engine import Call, Engine, run
from tests.support.requests import prompt
from vllm_mtpc import demo
from vllm_mtpc.engine.server import run_server
from vllm_mtpc.errors import EngineFailed

SPEC = json.dumps({"method": "mtpc", "model": str(demo.path("btree"))})
WORDS = [str(demo.path("target")), "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"]
WORDS += ["--kv-cache-memory-bytes", str(1 << 26), "--max-num-seqs", "4", "--speculative-config", SPEC]
LONG = {"prompt": list(b"import os\n"), "max_tokens": 1000, "temperature": 0, "ignore_eos": True}
GREEDY = {"temperature": 0, "max_tokens": 100, "ignore_eos": True}
PATIENCE_S = 120.0
ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def wait(what: str, log: Path, is_so) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, f"{what}: not within {PATIENCE_S:.0f} s; the log ends with\n{tail(log)}"
        time.sleep(0.2)


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() in ENDED
    except psutil.NoSuchProcess:
        return True


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "victim"), [(1, "EngineCore"), (2, "Worker_TP1")])
def test_killed_process_ends_the_server(ranks: int, victim: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks))), "TORCHDYNAMO_DISABLE": "1"}
    words = [*WORDS, "--tensor-parallel-size", str(ranks)]
    with run_server(words, log, environment) as client, ThreadPoolExecutor(2) as pool:
        server = psutil.Process(client.process)
        below = server.children(recursive=True)
        (process,) = [child for child in below if victim in "".join(child.cmdline())]
        asked = [pool.submit(client.complete, {"model": client.model(), **LONG}) for _ in range(2)]
        wait("drafts", log, lambda: client.acceptance().drafts > 20)
        process.kill()
        for future in asked:
            with pytest.raises((EngineFailed, OSError, http.client.HTTPException)):
                future.result(timeout=PATIENCE_S)
        wait("the server's end", log, lambda: all(map(has_ended, (server, *below))))
    assert "EngineDeadError" in log.read_text(errors="replace")


def test_jumping_clocks_and_a_full_kv_cache_change_no_greedy_token() -> None:
    """Costs are learnt from a clock; eight requests outgrow ten blocks, so some are preempted and read again."""
    calls = [Call([prompt(20, start) for start in range(8)], [GREEDY] * 8), Call([prompt(12)], [GREEDY])]
    arguments = {"max_model_len": 240, "max_num_batched_tokens": 40, "block_size": 32, "num_gpu_blocks_override": 10}
    drafts = {"speculative_config": json.loads(SPEC)}
    target = str(demo.path("target"))
    replies = run(
        {
            "plain": Engine(target, calls, arguments),
            "jumps": Engine(target, calls, {**arguments, **drafts}, "clock jumps"),
        },
        "v1",
    )
    plain, jumping = replies["plain"], replies["jumps"]
    assert [reply.tokens for reply in jumping] == [reply.tokens for reply in plain]
    for reply in jumping:
        passed = np.diff(reply.recorded)
        assert (passed > 3000).any() and (passed < -3000).any() and (passed == 0).any()
        assert reply.metrics["vllm:spec_decode_num_accepted_tokens"] > 0
    assert jumping[0].metrics["vllm:num_preemptions"] > 0
