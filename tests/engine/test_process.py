"""A command ends with the process that watches it, and with the parent of that process."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

SLEEPS = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"


@pytest.mark.parametrize("how", ["the parent ends", "Ray kills the watcher"])
def test_command_ends(how: str) -> None:
    words = [sys.executable, "-m", "vllm_mtpc.engine.process", sys.executable, "-c", SLEEPS]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as watcher:
        assert watcher.stdin is not None and watcher.stdout is not None
        command = psutil.Process(int(watcher.stdout.readline()))
        if how == "the parent ends":
            watcher.stdin.close()
        else:
            watcher.kill()
        command.wait(30)
        watcher.wait(30)
