"""Run a job with `vllm.LLM` in a child process: `python -m benchmarks.engine_child FD`.

A job is a function `job(llm, items, **given)` that yields answers. The child reads lines of JSON from its standard
input: first the engine's arguments and the job, then the items. It writes each answer as a line of JSON to the file
descriptor FD.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, TextIO

from pydantic import TypeAdapter

from benchmarks.child_process import failure, group
from vllm_mtpc.engine.process import engine_environment


class Child:
    """A running job."""

    def __init__(self, process: subprocess.Popen[bytes], answers: TextIO, log: Path) -> None:
        self.process, self._answers, self._log = process, answers, log

    def send(self, item: Any) -> None:
        """Send one item to a job that was started without items."""
        assert self.process.stdin is not None  # a pipe
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(_line(item))
            self.process.stdin.flush()

    def answer(self, kind: Any = Any) -> Any:
        """Return the next answer, of that type. Raises EngineFailed if the process has ended."""
        line = self._answers.readline()
        if not line:
            raise failure("the engine", self.process.wait(), self._log)
        return TypeAdapter(kind).validate_json(line)


@contextlib.contextmanager
def started(
    job: Callable[..., Iterator[Any]],
    engine: dict[str, Any],
    log: Path,
    given: Mapping[str, Any] | None = None,
    items: Iterable[Any] | None = None,
    on_cpu: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Child]:
    """Start a child process, which ends with the context; its engine may still be starting.

    Args:
        job: function of a module.
        engine: keyword arguments of `vllm.LLM`.
        log: file of the process's output.
        given: keyword arguments of the job.
        items: of the job; None: `Child.send` sends them.
        on_cpu: defaults of the engine on a CPU.
        environment: added to that of every engine.
    """
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **engine_environment(), **(environment or {})}
    module = sys.modules[job.__module__]
    name = f"{module.__spec__.name if module.__spec__ else module.__name__}:{job.__name__}"  # of `python -m`: __main__
    what = {"job": name, "engine": engine, "on_cpu": on_cpu or {}, "given": given or {}}
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as lines, os.fdopen(reading, encoding="utf-8") as answers:
        lines.writelines(map(_line, (what, *(items or ()))))
        lines.seek(0)
        stdin = subprocess.PIPE if items is None else lines
        command = [sys.executable, "-m", "benchmarks.engine_child", str(writing)]
        with group(command, log, variables, pass_fds=[writing], stdin=stdin) as process:
            os.close(writing)
            child = Child(process, answers, log)
            if items is None:
                child.send(what)
            yield child


def _line(what: Any) -> bytes:
    return json.dumps(what, default=asdict).encode() + b"\n"


def main(file: int) -> None:
    """Run the job in the child process."""
    from vllm import LLM
    from vllm.platforms import current_platform

    what = json.loads(sys.stdin.readline())
    defaults = {"disable_log_stats": False, **(what["on_cpu"] if current_platform.is_cpu() else {})}
    llm = LLM(**{**defaults, **what["engine"]})
    with os.fdopen(file, "wb") as answers:
        for answer in resolve_name(what["job"])(llm, map(json.loads, sys.stdin), **what["given"]):
            answers.write(_line(answer))
            answers.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
