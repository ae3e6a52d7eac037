"""A command ends with the parent of the process that watches it."""

from __future__ import annotations

import subprocess
import sys

import psutil

SLEEPS = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"


def test_command_ends_with_the_parent() -> None:
    words = [sys.executable, "-m", "vllm_mtpc.engine.process", sys.executable, "-c", SLEEPS]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as watcher:
        assert watcher.stdin is not None and watcher.stdout is not None
        command = psutil.Process(int(watcher.stdout.readline()))
        watcher.stdin.close()
        command.wait(30)
        watcher.wait(30)
