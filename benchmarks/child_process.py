"""Child processes that end with a context: a process group each, with the output in a log."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from vllm_mtpc.engine.process import end_group

# Environment of Model Runner V2 with interpreted kernels, as scripts/v2_on_cpu.sh sets it
INTERPRETED = {
    "TRITON_INTERPRET": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "PYTHONPATH": str(Path(__file__).parents[1] / "scripts" / "interpreter"),
}


def tail(log: Path, lines: int = 25) -> str:
    """Return the last lines of a log."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    return "\n".join(text.splitlines()[-lines:])


@contextlib.contextmanager
def group(
    command: Sequence[str], log: Path, environment: dict[str, str], grace_s: float = 20.0, cwd: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in its own process group, and end the whole group with the context.

    Args:
        command: words.
        log: file of its output.
        environment: of the process.
        grace_s: seconds from SIGTERM to SIGKILL; an engine may outlive its front-end.
        cwd: working directory; None: that of this process.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        files = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(command, env=environment, cwd=cwd, start_new_session=True, **files)
    try:
        yield process
    finally:
        if process.poll() is None:
            end_group(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=grace_s)
        end_group(process.pid, signal.SIGKILL)
        process.wait()
