"""Child processes that end with their parent: a process group each, with the output in a log.

`python -m vllm_mtpc.engine.process COMMAND ...` runs a command for a parent that may be killed, as a replica of Ray
Serve can be. Its standard input is a pipe from the parent: when the pipe closes, the command's process group is ended.
If this process itself is killed, Linux signals the command.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vllm_mtpc.errors import EngineFailed

GRACE_S = 5.0  # from the end of the parent


def engine_environment() -> dict[str, str]:
    """Return the environment of an engine's process, the same for all engines of a run.

    One core is left to the front-end, as in `vllm serve`: OpenMP threads on busy cores wait for each other.
    """
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "VLLM_NO_USAGE_STATS": "1"}
    environment["MTPC_AUTO"] = "0"  # the caller chooses the head, not a head bundled in the target
    environment.setdefault("HF_HUB_OFFLINE", "1")
    environment.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() - 1)))
    # vLLM's ngram runs on numba, whose first parallel loop sets the number of torch's OpenMP threads to its own
    environment.setdefault("NUMBA_NUM_THREADS", environment["OMP_NUM_THREADS"])
    return environment


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_seconds(pid: int) -> float:
    """Return user and system CPU seconds of a process and its running descendants."""
    import psutil

    found: list[psutil.Process] = []
    total = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        found = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    for one in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(one.cpu_times()[:2])
    return total


def tail(log: Path, lines: int = 25) -> str:
    """Return the last lines of a log."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    return "\n".join(text.splitlines()[-lines:])


def failure(what: str, code: int | None, log: Path) -> EngineFailed:
    return EngineFailed(f"{what} ended with exit code {code}; the end of its log {log}:\n{tail(log)}")


@contextlib.contextmanager
def group(
    command: Sequence[str], log: Path, environment: dict[str, str], grace_s: float = 20.0, **more: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in its own process group, and end the whole group with the context.

    Args:
        command: words.
        log: file of its output.
        environment: of the process.
        grace_s: seconds from SIGTERM to SIGKILL; an engine may outlive its front-end.
        more: arguments of `subprocess.Popen`.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        more = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT, **more}
        process = subprocess.Popen(command, env=environment, start_new_session=True, **more)
    try:
        yield process
    finally:
        if process.poll() is None:
            _end_group(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=grace_s)
        _end_group(process.pid, signal.SIGKILL)
        process.wait()


def _end_group(leader: int, how: signal.Signals) -> None:
    """Signal a process group if it still exists."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, how)


def main(command: list[str]) -> int:
    """Run a command until it ends or standard input closes."""

    def end() -> None:
        _end_group(child.pid, signal.SIGTERM)
        killer = threading.Timer(GRACE_S, _end_group, (child.pid, signal.SIGKILL))
        killer.daemon = True
        killer.start()

    def watch() -> None:
        while os.read(0, 4096):
            pass
        end()

    on_start = _end_with_parent if sys.platform == "linux" else None
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=on_start)
    # no SIGKILL: the command may finish its requests (--shutdown-timeout) while the parent runs
    signal.signal(signal.SIGTERM, lambda *_: _end_group(child.pid, signal.SIGTERM))
    threading.Thread(target=watch, daemon=True).start()
    code = child.wait()
    _end_group(child.pid, signal.SIGKILL)  # an engine may outlive its front-end
    return code if code >= 0 else 128 - code


def _end_with_parent() -> None:
    import ctypes

    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
