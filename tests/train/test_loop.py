"""The training loop of every family: it learns, repeats, resumes bit for bit, and measures what it trained."""

from __future__ import annotations

import errno
import shutil
import signal
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.support.training import BACKBONE, PTP_CASES, losses, make_trainer, options_for, random_documents
from vllm_mtpc.errors import CheckpointError
from vllm_mtpc.eval.circuit_evaluator import collect, summarise
from vllm_mtpc.eval.text import Sampling
from vllm_mtpc.train import state
from vllm_mtpc.train.circuit_trainer import CircuitTrainer
from vllm_mtpc.train.trainer import METRICS_FILE, Trainer, held_out_prompts, read_metrics

torch.set_num_threads(1)
CASES = {
    "nll": {"circuit": "hmm"},
    "acceptance": {"beta": 1.0, "acceptance": 0.5, "train_first": False},
    "shared": {"leaves": {"kind": "lm_head"}, "circuit": "cp"},
    "mlp": {
        "trunk": "mlp",
        "leaves": "lm_head",
        "draft_vocab_size": 7,
        "beta": 0.5,
        "acceptance": 0.5,
        "train_first": False,
    },
    "layers": {"trunk": {"kind": "lora", "layers": 1}, "learning_rate": 3e-3},
    "backbone": BACKBONE | {"learning_rate": 5e-3, "circuit": "ff", "components": 1},
    **PTP_CASES,
}


def run(options, target, documents=None) -> Trainer:
    trainer = make_trainer(options, target, documents)
    trainer.train()
    return trainer


def save_every(trainer: Trainer, steps: int) -> Trainer:
    """Make the trainer save its state every `steps` steps in place of minutes."""
    trainer.stopping.due = lambda: trainer.step % steps == 0
    return trainer


def end_after(trainer: Trainer, steps: int) -> Trainer:
    """Make the trainer save its state and end after `steps` steps, as a signal does."""
    update = trainer.train_step

    def train_step(*args, **kwargs):
        trainer.stopping._received = signal.SIGTERM if trainer.step + 1 == steps else 0
        return update(*args, **kwargs)

    trainer.train_step = train_step
    return trainer


@pytest.mark.parametrize("case", CASES)
def test_training_learns_and_resumes_bit_for_bit(tiny_target, tmp_path, case):
    few = random_documents(4)  # of random text, which can only be learnt by heart
    changes = {"max_steps": 30, "windows_per_step": 32, **CASES[case]}
    whole = run(options_for(tiny_target, tmp_path / "a", **changes), tiny_target, few)
    end_after(make_trainer(options_for(tiny_target, tmp_path / "b", **changes), tiny_target, few), 6).train()
    loss = losses(tmp_path / "a")
    # its own continuations change as a student learns: their loss need not fall from one step to the next
    assert np.mean(loss[-5:]) < np.mean(loss[:3]) - (0.0 if "own" in case else 0.02)
    assert loss[:6] == losses(tmp_path / "b")
    with (tmp_path / "b" / METRICS_FILE).open("a") as file:
        file.write('{"step": 7, "loss": 9}\n{"st')  # what a kill leaves: a step after the state, and part of a line
    again = run(options_for(tiny_target, tmp_path / "b", resume=True, **changes), tiny_target, few)
    assert losses(tmp_path / "b") == loss
    one, other = again.model.head.state_dict(), whole.model.head.state_dict()
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert all(1 <= line["tokens_per_step"] <= 4 for line in read_metrics(tmp_path / "a" / METRICS_FILE))


@pytest.mark.parametrize("case", ["nll", "acceptance", "mlp", "backbone", "ce", "kl", "inverse", "own", "trust"])
def test_chunks_of_a_step_give_the_same_loss_and_gradients(tiny_target, tmp_path, case):
    found = []
    for chunk in (None, 7, 1):
        options = options_for(tiny_target, tmp_path, **CASES[case] | {"windows_per_step": 32, "chunk_windows": chunk})
        trainer = make_trainer(options, tiny_target)
        with torch.no_grad():
            for value in trainer.model.parameters():
                value.add_(0.05 * torch.randn(value.shape, generator=torch.Generator().manual_seed(5)))
        loss, watched = trainer.model(next(trainer.windows.batches()), watch=True)
        loss.backward()
        assert watched[1] > 0
        found.append([loss, watched, *(value.grad for value in trainer.model.parameters() if value.grad is not None)])
    for other in found[1:]:  # float32 sums in another order
        for value, expected in zip(other, found[0], strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-3, atol=1e-6)


def test_state_of_another_run_is_refused(tiny_target, tmp_path):
    run(options_for(tiny_target, tmp_path, max_steps=2), tiny_target)
    with pytest.raises(CheckpointError, match=r"run with gamma=0.9, not 0.8; resume with the options"):
        run(options_for(tiny_target, tmp_path, resume=True, gamma=0.8), tiny_target)
    longer = run(options_for(tiny_target, tmp_path, resume=True, max_steps=4), tiny_target)  # how long is free
    assert longer.step == 4
    (tmp_path / "state" / "step-4" / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match=r"damaged .*; delete it and train again without --resume"):
        run(options_for(tiny_target, tmp_path, resume=True), tiny_target)
    with pytest.raises(CheckpointError, match=r"run without --resume to start one"):
        run(options_for(tiny_target, tmp_path / "new", resume=True), tiny_target)


def test_full_disk_keeps_the_state_before(tiny_target, tmp_path, monkeypatch):
    trainer = run(options_for(tiny_target, tmp_path, max_steps=6), tiny_target)
    kept = {file.name: file.read_bytes() for file in (tmp_path / "state" / "step-6").iterdir()}

    def full(folder):
        (Path(folder) / "model.safetensors").write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "state" / "partial").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(trainer.accelerator, "save_state", lambda folder: Path(folder).mkdir() or full(folder))
        with pytest.raises(CheckpointError, match=r"No space left.*saved before is intact.*--resume"):
            trainer.save_state()
        assert [path.name for path in (tmp_path / "state").iterdir()] == ["step-6"]
        assert {file.name: file.read_bytes() for file in (tmp_path / "state" / "step-6").iterdir()} == kept
        shutil.move(tmp_path / "state" / "step-6", tmp_path)
        with pytest.raises(CheckpointError, match=r"No space left.*none was saved before: free space and run the same"):
            trainer.save_state()
    shutil.move(tmp_path / "step-6", tmp_path / "state")
    run(options_for(tiny_target, tmp_path, max_steps=7, resume=True), tiny_target)
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["step-7"]


@pytest.mark.parametrize("what", ["weights", "moments", "loss"])
def test_diverged_state_does_not_replace_a_good_one(tiny_target, tmp_path, monkeypatch, what):
    """NaN in the update of step 4, or in the loss of step 3: the loss of step 4, from the weights before, is finite."""
    trainer = save_every(make_trainer(options_for(tiny_target, tmp_path, log_every=10), tiny_target), 2)
    update = trainer.train_step

    def injected(*args, **kwargs):
        loss, watched = update(*args, **kwargs)
        if trainer.step == 3:
            moments = trainer.optimizer.state[trainer.model.head.leaves.leaf_weight]
            held = {"weights": trainer.model.head.leaves.leaf_weight, "moments": moments["exp_avg"], "loss": loss}[what]
            with torch.no_grad():
                held.view(-1)[-1] = float("nan")
        return loss, watched

    monkeypatch.setattr(trainer, "train_step", injected)
    with pytest.raises(CheckpointError, match=r"(nan|NaN or infinite) at step 4: .*step-2 is intact"):
        trainer.train()
    assert state.latest_state(tmp_path / "state").name == "step-2"
    kept = load_file(tmp_path / "state" / "step-2" / "model.safetensors")
    assert all(value.isfinite().all() for value in kept.values())


def test_resume_accepts_the_same_paths_in_another_form(tiny_target, tmp_path, monkeypatch):
    """The same text, named from another folder or in full, as on Ray; other text is another run's."""
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text("text")

    def resume(data: str, steps: int, **changes) -> int:
        names = {"data": [data], "validation_data": ["a.txt"]}
        return run(options_for(tiny_target, tmp_path / "out", **names, max_steps=steps, **changes), tiny_target).step

    monkeypatch.chdir(tmp_path / "here")
    resume("*.txt", 1)
    for step, data in enumerate(("../here/*.txt", str(tmp_path / "here" / "*.txt")), 2):
        assert resume(data, step, resume=True) == step
    with pytest.raises(CheckpointError, match=r"run with data=\['\S*/here/\*.txt'\], not \['\S*/there/\*.txt'\]"):
        resume("../there/*.txt", 4, resume=True)


def test_results_use_the_rule_of_their_temperature(tiny_target, tmp_path):
    few = {"evaluation_sequences": 6, "evaluation_tokens": 20}
    options = options_for(tiny_target, tmp_path, dtype="float32", **few)
    trainer = CircuitTrainer(options, tiny_target)
    trainer.save({}, {"steps": 0})
    samples = trainer.continuations(held_out_prompts(options, tiny_target, random_documents()))
    found = trainer.measure(samples)
    for name, temperature in (("t1", 1.0), ("t0", 0.0)):
        contexts = collect(trainer.head, tiny_target, samples[name], Sampling(temperature))
        assert found[name] == asdict(summarise(contexts))
    assert abs(found["t1"]["anywhere"] - found["t0"]["anywhere"]) > 0.2  # so that mixing them up shows


@pytest.mark.parametrize(
    ("asked", "seconds", "measured"), [(None, 4, [8]), (None, 20, [8, 32]), (None, 1000, [8, 64]), (64, 4, [64])]
)
def test_default_evaluation_ends_within_its_seconds(tiny_target, tmp_path, monkeypatch, asked, seconds, measured):
    """A text takes half a second by this clock."""
    trainer = CircuitTrainer(options_for(tiny_target, tmp_path, evaluation_sequences=asked), tiny_target)
    now, found = [0.0], []

    def measure(texts):
        now[0] += len(texts) / 2
        found.append(len(texts))
        return {"t1": {"sequences": len(texts)}}

    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(trainer, "continuations", lambda texts: texts)
    monkeypatch.setattr(trainer, "measure", measure)
    assert trainer.validate(list(range(64)), seconds)["t1"]["sequences"] == measured[-1]
    assert found == measured
