"""`vllm-mtpc train --ray-workers` without a cluster: what reaches a worker, and how it comes back when it fails."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.support.training import flags, losses
from vllm_mtpc.cli import main
from vllm_mtpc.errors import CheckpointError, MtpcError
from vllm_mtpc.train.run import cause

ray_train = pytest.importorskip("ray.train", reason="Ray is not installed: pip install '.[ray]'")


@pytest.fixture
def worker_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the place of Ray's trainer, one worker in this process that starts in another folder, as Ray's do."""
    import ray.train.torch

    class Trainer:
        def __init__(self, worker, train_loop_config, **config) -> None:
            self.worker, self.values = worker, train_loop_config

        def fit(self) -> None:
            here = Path.cwd()
            os.chdir(tmp_path)
            try:
                self.worker(self.values)
            finally:
                os.chdir(here)

    monkeypatch.setattr(ray.train.torch, "TorchTrainer", Trainer)


def relative(place: Path, out: str, **changes: object) -> list[str]:
    """Flags with every path relative to `place`, and the data a glob."""
    words = [word.removeprefix(f"{place}/") for word in flags(place, out, evaluation_sequences=0, **changes)]
    return ["train", *words, "--data", "te*.jsonl"]


@pytest.mark.usefixtures("worker_elsewhere")
def test_ray_and_single_process_share_states(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    assert main(relative(place, "whole", max_steps=4)) == 0
    for changes in ({"max_steps": 1, "ray_workers": 1}, {"max_steps": 2}, {"max_steps": 4, "ray_workers": 1}):
        assert main(relative(place, "parts", save_minutes=0, resume=changes["max_steps"] > 1, **changes)) == 0
    assert losses(place / "parts")[1:] != losses(place / "parts")[:-1]
    assert len(losses(place / "parts")) == len(losses(place / "whole")) == 4


def test_worker_error_that_the_user_can_fix_is_raised() -> None:
    from ray.train.v2._internal.exceptions import UserExceptionWithTraceback

    fixable, full = CheckpointError("fix it"), OSError(errno.ENOSPC, "No space left on device")
    lost = RuntimeError("several lines\nconnection closed by peer")
    failures = {0: lost, 1: UserExceptionWithTraceback(fixable, "Traceback ...")}
    assert cause(ray_train.WorkerGroupError("long", failures)) is fixable
    assert cause(ray_train.WorkerGroupError("long", {0: full, 1: lost})) is full
    for error in (ray_train.WorkerGroupError("long", {1: lost}), ray_train.ControllerError(lost)):
        found = cause(error)
        assert isinstance(found, MtpcError)
        assert "training on Ray failed (RuntimeError: connection closed by peer)" in str(found)
