"""Validation of a trained head: results by temperature, and their number in limited time."""

from __future__ import annotations

import pytest
import torch

from tests.support.tiny import acceptance
from tests.support.training import options_for, random_documents
from vllm_mtpc.eval.text import Sampling
from vllm_mtpc.train.circuit_trainer import CircuitTrainer
from vllm_mtpc.train.trainer import held_out_prompts


def test_results_use_the_rule_of_their_temperature(tiny_target, tmp_path):
    """Against the mean over all positions, written out: `anywhere` weights them alike."""
    few = {"evaluation_sequences": 6, "evaluation_prompt_tokens": 4, "evaluation_tokens": 20}
    options = options_for(tiny_target, tmp_path, dtype="float32", **few)
    trainer = CircuitTrainer(options, tiny_target)
    trainer.save({}, {"steps": 0})
    samples = trainer.continuations(held_out_prompts(options, tiny_target, random_documents()))
    found = trainer.measure(samples)
    values = {}
    for name, some in samples.items():
        total = []
        ends = some.prompt_lengths - 1, some.lengths - 2
        for text, hidden, first, last in zip(some.tokens, some.hidden, *ends, strict=True):
            for t in range(int(first), int(last)):
                at = torch.arange(t, t + options.window)
                sampling = Sampling(0.0 if name == "t0" else 1.0)
                kept = acceptance(trainer.head, tiny_target, hidden[at][None], text[at + 1][None], sampling)
                total.append(1 + kept.sum().item())
        values[name] = sum(total) / len(total)
    assert found["t0"]["anywhere"] == pytest.approx(values["t0"], abs=1e-5)
    # the figure averages the last factor of each product over the target's distribution: same mean, other noise
    assert found["t1"]["anywhere"] == pytest.approx(values["t1"], abs=0.1)
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


def test_no_prompts_without_sequences(tiny_target, tmp_path):
    options = options_for(tiny_target, tmp_path, evaluation_sequences=0)
    assert held_out_prompts(options, tiny_target, random_documents()) == []
