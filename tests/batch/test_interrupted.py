"""`vllm-mtpc batch` killed at random moments and at a full disk, and typed again; its engine a fake server."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.clusters import FAKE, answers_of, cluster, text_of, write_prompts

PROMPTS = {f"n{number}": f"prompt {number} " + "long " * (3000 * (number % 20 == 19)) for number in range(60)}
ANSWERS = {name: prompt[::-1] for name, prompt in PROMPTS.items()}
LIMIT = 8 << 10  # bytes of a file: a part with a long answer has more
# vLLM's parser is left out: importing it takes longer than all else here
CODE = (
    "import sys; from vllm_mtpc.batch import worker; from vllm_mtpc.engine import options; "
    "from vllm_mtpc.cli import main; "
    f"worker.PROGRAM = {FAKE}; options.check_flags = lambda words: None; sys.exit(main(sys.argv[1:]))"
)
PATIENCE_S = 120.0


class Job:
    """60 lines, six at once, 0.15 s each."""

    def __init__(self, folder: Path) -> None:
        self.input, self.output, self.log = folder / "in.jsonl", folder / "out", folder / "log"
        write_prompts(self.input, PROMPTS)

    def start(self, *more: str, on_start: Callable[[], None] | None = None) -> subprocess.Popen[bytes]:
        where = ["--input", str(self.input), "--output", str(self.output), "--model", "m"]
        size = ["--part-lines", "3", "--in-flight", "6", "--body", '{"max_tokens": 15}']
        with self.log.open("wb") as log:
            command = [sys.executable, "-c", CODE, "batch", *where, *size, *more]
            return subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=on_start)

    def count(self) -> int:
        return len(list(self.output.glob("part-*.jsonl")))

    def found(self) -> dict[str, str]:
        return {name: text_of(answer) for name, answer in answers_of(self.output).items()}


def wait(is_so: Callable[[], bool], log: Path, child: subprocess.Popen[bytes] | None = None) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert (child is None or child.poll() in (None, 0)) and time.monotonic() < deadline, log.read_text()
        time.sleep(0.01)


@pytest.mark.parametrize("is_on_ray", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_job_killed_at_any_moment_is_resumed(is_on_ray: bool, tmp_path: Path) -> None:
    """What a killed job has written stays, and its servers end; at the end every line has one answer."""
    if is_on_ray:
        pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
    job, chance, seen = Job(tmp_path), random.Random(0), [0]
    kept: dict[str, dict[str, Any]] = {}
    with cluster(cpus=2) if is_on_ray else contextlib.nullcontext() as nodes:
        where = ["--address", nodes.address] if nodes else []
        for new_parts in (0, 3, 2):
            child = job.start(*where)
            more = job.count() + new_parts
            wait(lambda: job.output.exists() and job.count() >= more, job.log, child)  # noqa: B023
            time.sleep(chance.uniform(0, 0.2))
            child.send_signal(signal.SIGKILL)
            child.wait()
            assert answers_of(job.output).items() >= kept.items() and job.found().items() <= ANSWERS.items()
            kept = answers_of(job.output)
            seen.append(len(kept))
            servers = {answer["response"]["body"]["process"] for answer in kept.values()}
            wait(lambda: not any(Path(f"/proc/{server}").exists() for server in servers), job.log)  # noqa: B023
        assert job.start(*where).wait(PATIENCE_S) == 0, job.log.read_text()
    assert job.found() == ANSWERS
    assert any(0 < count < len(PROMPTS) for count in seen), seen  # else no kill came while it answered


@pytest.mark.slow
def test_job_is_resumed_after_a_full_disk(tmp_path: Path) -> None:
    """Files of more than LIMIT cannot be written, as on a full disk."""
    job = Job(tmp_path)

    def little_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, LIMIT))

    child = job.start(on_start=little_room)
    assert child.wait(PATIENCE_S) == 1
    *_, said = job.log.read_text().strip().splitlines()
    assert f"vllm-mtpc: error: --output {job.output}: " in said and "what was written is whole: type it again" in said
    assert os.strerror(errno.EFBIG) in said and "Traceback" not in job.log.read_text()
    before = job.found()
    assert 0 < len(before) < len(PROMPTS) and before.items() <= ANSWERS.items()
    assert not list(job.output.glob("*.partial"))
    assert job.start().wait(PATIENCE_S) == 0, job.log.read_text()
    assert job.found() == ANSWERS
