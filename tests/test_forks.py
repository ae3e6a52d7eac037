"""Forks of a preloaded process begin as new ones, and whatever happens in them is told and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support import forks


def about_itself() -> dict[str, object]:
    """What a fork finds: nothing that an engine or an earlier fork has left, vLLM imported, one thread."""
    found = {
        "left": os.environ.get("LEFT"),
        "runner": os.environ.get("VLLM_USE_V2_MODEL_RUNNER"),
        "imported": "vllm.v1.engine.llm_engine" in sys.modules,
        "threads": psutil.Process().num_threads(),
        "given": os.environ.get("GIVEN"),
    }
    os.environ["LEFT"] = "something"
    return found


def crash() -> None:
    print("the last words", flush=True)
    os.abort()


def fail() -> None:
    raise ValueError("wrong in there")


def hang(file: str) -> None:
    """With a child that would outlive it."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(file).write_text(str(child.pid))
    time.sleep(600)


def leave(file: str) -> str:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(file).write_text(str(child.pid))
    return "answered"


def has_ended(pid: int) -> bool:
    """Within some seconds: it was killed by another process."""
    for _ in range(100):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.1)
    return False


def test_every_fork_begins_anew() -> None:
    wanted = {"left": None, "runner": None, "imported": True, "threads": 1}
    assert forks.call("v1", "tests.test_forks:about_itself", GIVEN="a") == {**wanted, "given": "a"}
    assert forks.call("v1", "tests.test_forks:about_itself") == {**wanted, "given": None}


def test_crashes_and_errors_are_told() -> None:
    with pytest.raises(RuntimeError, match=r"ended with -6(.|\n)*the last words"):
        forks.call("v1", "tests.test_forks:crash")
    with pytest.raises(RuntimeError, match=r"ended with 1(.|\n)*ValueError: wrong in there"):
        forks.call("v1", "tests.test_forks:fail")


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    assert forks.call("v1", "tests.test_forks:leave", str(file)) == "answered"
    assert has_ended(int(file.read_text()))
    with pytest.raises(TimeoutError):
        forks.call("v1", "tests.test_forks:hang", str(file), timeout=3)
    assert has_ended(int(file.read_text()))


def test_a_server_ends_with_whoever_asked_it(tmp_path: Path) -> None:
    """Killed in the middle of a call: the server goes, and the fork with it."""
    file = tmp_path / "pid"
    code = "from tests.support import forks; forks.IMPORTED = ('json',); "
    code += f"forks.call('v1', 'tests.test_forks:hang', {str(file)!r})"
    asker = subprocess.Popen([sys.executable, "-c", code], cwd=forks.ROOT)
    while not file.is_file() or not file.read_text():
        assert asker.poll() is None
        time.sleep(0.1)
    below = psutil.Process(asker.pid).children(recursive=True)
    asker.kill()
    asker.wait()
    assert len(below) >= 2 and all(has_ended(process.pid) for process in below)


def test_on_a_gpu_nothing_is_inherited_and_nothing_interpreted() -> None:
    """A fork of what has imported vLLM could inherit a GPU in use."""
    code = "from tests.support import forks; print(forks.call('v2', 'tests.test_forks:about_itself'))"
    environment = {**os.environ, "MTPC_TEST_GPU": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=forks.ROOT, env=environment, capture_output=True, text=True)
    assert "'runner': '1', 'imported': False" in done.stdout, done.stderr
    code = "from tests.support import engine; print('enforce_eager' in engine.SMALL, engine.SMALL['max_num_seqs'])"
    environment["MTPC_TEST_ENGINE"] = '{"max_num_seqs": 3}'
    done = subprocess.run([sys.executable, "-c", code], cwd=forks.ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "3"], done.stderr
