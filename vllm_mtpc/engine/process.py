"""Child processes that end with their parent: a process group each, with the output in a log.

`python -m vllm_mtpc.engine.process COMMAND ...` runs a command for a parent that may be killed. Its standard input is a
pipe from the parent: when the pipe closes, the command's process group receives SIGTERM, and SIGKILL after GRACE_S.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

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

    total = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += sum(process.cpu_times()[:2])
    return total


def end_group(leader: int, how: signal.Signals) -> None:
    """Signal a process group if it still exists."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, how)


def main(command: list[str]) -> int:
    """Run a command until it ends or standard input closes."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        end_group(child.pid, signal.SIGTERM)
        time.sleep(GRACE_S)
        end_group(child.pid, signal.SIGKILL)

    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    # no SIGKILL: the command may finish its requests (--shutdown-timeout) while the parent runs
    signal.signal(signal.SIGTERM, lambda *_: end_group(child.pid, signal.SIGTERM))
    threading.Thread(target=watch, daemon=True).start()
    code = child.wait()
    end_group(child.pid, signal.SIGKILL)  # an engine may outlive its front-end
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
