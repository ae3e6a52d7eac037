"""A run that a signal or its minutes end: it saves its state and resumes with the same losses."""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.training import flags, losses, make_trainer, options_for
from vllm_mtpc.checkpoint import check_tensors, read_config
from vllm_mtpc.cli import main
from vllm_mtpc.train import state
from vllm_mtpc.train.state import Stopping
from vllm_mtpc.train.trainer import read_metrics

STEPS = 120  # of some milliseconds each: a child is caught in the midst of them
DEADLINE = 120


def words(place: Path, out: str, **changes: object) -> list[str]:
    return ["train", *flags(place, out, max_steps=STEPS, evaluation_sequences=0, dtype="float32", **changes)]


def kill_at(place: Path, out: str, step: int, number: int, **changes: object) -> tuple[int, str]:
    """Exit code and errors of a child that gets a signal once it has logged a step."""
    line = [sys.executable, "-m", "vllm_mtpc", *words(place, out, **changes)]
    environment = dict(os.environ, OMP_NUM_THREADS=str(torch.get_num_threads()))
    child = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)
    until = time.monotonic() + DEADLINE
    while (logged := losses(place / out)) is None or len(logged) < step:
        assert child.poll() is None and time.monotonic() < until, child.stderr.read()[-3000:]
        time.sleep(0.002)
    child.send_signal(number)
    return child.wait(DEADLINE), child.stderr.read()


def test_run_killed_at_random_steps_resumes_bit_for_bit(place: Path) -> None:
    """SIGKILL, which leaves the last saved state, then SIGTERM, which saves one; both in children."""
    assert main(words(place, "whole")) == 0
    steps = random.Random(15)
    first, second = steps.randint(5, STEPS // 3), steps.randint(STEPS // 3, STEPS // 2)
    code, _ = kill_at(place, "parts", first, signal.SIGKILL, save_minutes=0)
    assert code == -signal.SIGKILL
    killed = int(state.latest_state(place / "parts" / "state").name.removeprefix("step-"))
    assert first - 1 <= killed < STEPS
    code, said = kill_at(place, "parts", second, signal.SIGTERM, resume=True)
    stopped = int(state.latest_state(place / "parts" / "state").name.removeprefix("step-"))
    assert code == 128 + signal.SIGTERM and second <= stopped < STEPS
    last = said.strip().splitlines()[-1]
    assert last.startswith(f"SIGTERM: ended after step {stopped}, its state is in")
    assert last.endswith(f"type the same command with --resume; for a head now, with --max-steps {stopped}")
    assert len(losses(place / "parts")) == stopped
    assert main([*words(place, "parts", resume=True), "--max-steps", str(stopped)]) == 0
    check_tensors(place / "parts", read_config(place / "parts"))
    assert main(words(place, "parts", resume=True)) == 0
    assert losses(place / "parts") == losses(place / "whole")
    whole, parts = (load_file(place / name / "model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_second_signal_ends_process_at_once(monkeypatch) -> None:
    ended = []
    monkeypatch.setattr(os, "kill", lambda process, number: ended.append(number))
    with Stopping(10, 1) as stopping:
        stopping._receive(signal.SIGTERM, None)
        stopping._receive(signal.SIGTERM, None)  # the same one: torchrun's agent passes on what its group was sent
        assert not ended and stopping.due() and stopping.signal == signal.SIGTERM
        monkeypatch.setattr(state, "SAME_SECONDS", -1.0)
        stopping._receive(signal.SIGTERM, None)
        assert ended == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_minutes_save_and_end_run_with_lowered_rate(tiny_target, tmp_path: Path, monkeypatch) -> None:
    """A step takes a minute by this clock: a state after every third step, and after the last one."""
    options = options_for(tiny_target, tmp_path, minutes=7, save_minutes=3, epochs=None, max_steps=None)
    trainer = make_trainer(options, tiny_target)
    trainer.stopping._began, trainer.stopping._saved_at, saved, save = 0.0, 0.0, [], trainer.save_state
    monkeypatch.setattr(state.time, "monotonic", lambda: 60.0 * trainer.step)
    monkeypatch.setattr(trainer, "save_state", lambda: saved.append(trainer.step) or save())
    trainer.train()
    assert saved == [3, 6, 7] and trainer.stopping.signal == 0
    assert state.latest_state(tmp_path / "state").name == "step-7"
    rates = [line["learning_rate"] / options.learning_rate for line in read_metrics(tmp_path / "metrics.jsonl")]
    # the cosine of 0, 1/7, ... of the time; the warm-up takes a quarter of it
    fall = [0.55 + 0.45 * math.cos(math.pi * part / 7) for part in range(7)]
    assert rates == pytest.approx([fall[0] / 30, 4 / 7 * fall[1], *fall[2:]])


RANK = """
import sys, signal, torch.distributed as dist
from vllm_mtpc.train.state import Stopping
store, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
stop = Stopping(10, 2)
print(stop.due(), stop.signal)
if rank == 1:
    stop._receive(signal.SIGTERM, None)
print(stop.due(), int(stop.signal))
"""


def test_signal_to_one_process_ends_all(tmp_path: Path) -> None:
    start = [sys.executable, "-c", RANK, str(tmp_path / "store")]
    ranks = [subprocess.Popen([*start, rank], stdout=subprocess.PIPE, text=True) for rank in ("0", "1")]
    for rank in ranks:
        assert rank.communicate(timeout=DEADLINE)[0].split() == ["False", "0", "True", str(int(signal.SIGTERM))]
