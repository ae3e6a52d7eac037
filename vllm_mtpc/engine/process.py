"""Child processes that never outlive the run: a process group each, its output in a log, its end explained."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from vllm_mtpc.errors import EngineFailed


def engine_environment() -> dict[str, str]:
    """The environment of an engine's process: every engine of a run gets the same one, so that only drafts differ.

    On a CPU, an engine inside the calling process does not bind its threads as ``vllm serve`` does, and two threads on
    two busy cores spend their time waiting for each other: one core is left to the front-end, as vLLM itself does.
    """
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "VLLM_NO_USAGE_STATS": "1"}
    environment["MTPC_AUTO"] = "0"  # what drafts is chosen by the caller, never by what a target ships
    environment.setdefault("HF_HUB_OFFLINE", "1")
    environment.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() - 1)))
    # vLLM's ngram runs on numba, whose first parallel loop sets the number of torch's OpenMP threads to its own
    environment.setdefault("NUMBA_NUM_THREADS", environment["OMP_NUM_THREADS"])
    return environment


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def tail(log: Path, lines: int = 25) -> str:
    """The last lines of a log, for an error message."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    return "\n".join(text.splitlines()[-lines:])


def failure(what: str, code: int | None, log: Path) -> EngineFailed:
    return EngineFailed(f"{what} ended with exit code {code}; the end of its log {log}:\n{tail(log)}")


@contextlib.contextmanager
def group(
    command: Sequence[str],
    log: Path,
    environment: dict[str, str],
    pass_fds: Sequence[int] = (),
    grace_s: float = 20.0,
    stdin: int | IO[bytes] = subprocess.DEVNULL,
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs ``command`` in a process group of its own and ends the whole group on leaving, whatever happened.

    The group is asked to end; what is left of it after ``grace_s`` is killed: an engine may outlive its front-end.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=pass_fds,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            end_group(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=grace_s)
        end_group(process.pid, signal.SIGKILL)
        process.wait()


def end_group(leader: int, how: signal.Signals) -> None:
    """Signals a process group, if any of it is left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, how)
