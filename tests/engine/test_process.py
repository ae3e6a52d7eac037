"""Servers as child processes: failures show the end of the output, and nothing is left running."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from vllm_mtpc.engine.options import API_KEY
from vllm_mtpc.engine.process import cpu_seconds
from vllm_mtpc.engine.server import VllmServer, run_server
from vllm_mtpc.errors import EngineFailed


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_stop_ends_processes_that_ignore_sigterm(tmp_path: Path) -> None:
    grandchild = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    code = (
        f"import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', {grandchild!r}], "
        f"stdout=subprocess.PIPE); p.stdout.readline(); open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid)); "
        "time.sleep(60)"
    )
    with pytest.raises(EngineFailed, match="was not healthy after 8 s"):
        asyncio.run(VllmServer([], program=[sys.executable, "-c", code]).start_async(timeout_s=8))
    assert not is_running(int((tmp_path / "pid").read_text()))


def test_server_that_ends_is_reported_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY, "sesame")
    executable = tmp_path / "python"
    executable.write_text(f'#!/bin/sh\necho "no such model [${API_KEY}]"\nexit 7\n')
    executable.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(executable))
    failure = pytest.raises(EngineFailed, match=r"(?s)exit code 7.*no such model \[\]")  # nor a key
    with failure, run_server(["x"], tmp_path / "log"):
        pass


def test_cpu_seconds_include_child_processes() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        deadline = time.monotonic() + 60
        while cpu_seconds(process.pid) < 1.0:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        own = psutil.Process(process.pid).cpu_times()
        assert own.user + own.system < 1.0  # the rest is its child's
        for child in psutil.Process(process.pid).children():
            child.kill()
