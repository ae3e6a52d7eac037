"""Child processes: failures show the end of the log, and nothing is left running."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from vllm_mtpc.engine.process import cpu_seconds, failure, group
from vllm_mtpc.engine.server import run_server
from vllm_mtpc.errors import EngineFailed


def alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc, which this system does not have")
def test_leaving_ends_the_whole_group(tmp_path: Path) -> None:
    """Also a grandchild that ignores SIGTERM, and also when the body raises."""
    grandchild = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    child = (
        f"import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', {grandchild!r}], "
        f"stdout=subprocess.PIPE); p.stdout.readline(); open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid)); "
        "time.sleep(60)"
    )
    with (
        pytest.raises(KeyError),
        group([sys.executable, "-c", child], tmp_path / "log", dict(os.environ), grace_s=5) as process,
    ):
        while not (tmp_path / "pid").is_file() or not (tmp_path / "pid").read_text():
            time.sleep(0.05)
        pid = int((tmp_path / "pid").read_text())
        assert alive(pid)
        raise KeyError
    assert process.returncode is not None
    deadline = time.monotonic() + 5
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid)


def test_failure_shows_the_end_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("\n".join(f"line {number}" for number in range(100)))
    message = str(failure("the engine", 3, log))
    assert "exit code 3" in message
    assert "line 99" in message
    assert "line 10\n" not in message


def test_server_that_ends_is_reported_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executable = tmp_path / "python"
    executable.write_text("#!/bin/sh\necho no such model\nexit 7\n")
    executable.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(executable))
    with pytest.raises(EngineFailed, match=r"(?s)exit code 7.*no such model"), run_server(["x"], tmp_path / "log"):
        pass


def test_cpu_seconds_include_child_processes(tmp_path: Path) -> None:
    code = "import subprocess, sys, time; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    with group([sys.executable, "-c", code], tmp_path / "log", dict(os.environ)) as process:
        deadline = time.monotonic() + 60
        while cpu_seconds(process.pid) < 1.0:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        own = psutil.Process(process.pid).cpu_times()
        assert own.user + own.system < 1.0  # the rest is its child's
