"""The recipe of byte-level targets: its long windows, and a training that goes on after an interruption."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.demo import byte_target, corpus
from benchmarks.demo.byte_target import is_long


@pytest.mark.parametrize("steps, long_steps", [(1700, 150), (3200, 130), (20, 2), (3, 1), (10, 0)])
def test_long_windows_are_spread_over_the_second_half(steps: int, long_steps: int) -> None:
    found = [step for step in range(steps) if is_long(step, steps, long_steps)]
    assert len(found) == long_steps and all(step >= steps // 2 for step in found)
    gaps = {after - before for before, after in pairwise(found)}
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_interrupted_training_goes_on_as_if_it_was_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = corpus.corpus_of([bytes(range(97, 123)) * 20], [b"-"], [])
    config = byte_target.target_config(1, 32, 32, positions=32)
    recipe = byte_target.Recipe(steps=104, long_steps=20, tokens_per_step=32, short_window=16, ahead_steps=8)
    whole = byte_target.train(text, config, recipe)
    step, count = byte_target.train_step, iter(range(104))

    def interrupted(*args: object) -> float:
        if next(count) == 102:
            raise KeyboardInterrupt
        return step(*args)

    monkeypatch.setattr(byte_target, "train_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        byte_target.train(text, config, recipe, state=tmp_path / "state.pt")
    monkeypatch.undo()
    resumed = byte_target.train(text, config, recipe, state=tmp_path / "state.pt")
    for one, other in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


def test_layer_k_predicts_the_token_k_places_ahead() -> None:
    """Of an alphabet that repeats, which states that name the present letter and right layers predict without loss."""
    count = 11
    turn = [50 * torch.eye(count).roll(k, 0) for k in range(4)]  # letter -> the letter k places later
    ahead = torch.nn.ModuleList(torch.nn.Linear(count, count, bias=False) for _ in range(2))
    for k, layer in enumerate(ahead, 2):
        layer.weight.data = turn[k]

    def model(input_ids: torch.Tensor, **how: object) -> SimpleNamespace:
        states = torch.eye(count)[input_ids]
        return SimpleNamespace(logits=states @ turn[1].T, hidden_states=[states])

    tokens = (torch.arange(20) % count)[None]
    assert byte_target.token_loss(model, tokens, ahead) < 1e-3
    ahead[1].weight.data = turn[2]
    assert byte_target.token_loss(model, tokens, ahead) > 1
