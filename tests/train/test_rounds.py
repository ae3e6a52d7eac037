"""Rounds: windows where serving starts steps, by the head as trained so far; also where a run is stopped or split."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tiny import acceptance
from tests.support.training import V, losses, make_trainer, options_for, save_every
from vllm_mtpc.data.sources import Documents
from vllm_mtpc.errors import CheckpointError, UsageError
from vllm_mtpc.eval.acceptance import collect, step_starts
from vllm_mtpc.eval.text import Samples, Sampling, with_backbone
from vllm_mtpc.train import state
from vllm_mtpc.train.options import parse
from vllm_mtpc.train.rounds import start_chances
from vllm_mtpc.train.windows import drawn

BACKBONE = {
    "head": "backbone", "backbone_layers": 1, "backbone_width": 32, "component_rank": 4, "train_first": False,
}  # fmt: skip


def walked(alive: list[list[float]], starts: list[int]) -> dict[int, float]:
    """P(a step starts) at each place: every way to walk through the continuations, one by one."""
    found = dict.fromkeys(starts, 0.0)

    def walk(place: int, probability: float) -> None:
        if place not in found or not probability:
            return
        found[place] += probability
        at_least = [1.0, *alive[starts.index(place)], 0.0]
        for accepted, (least, more) in enumerate(itertools.pairwise(at_least)):
            walk(place + 1 + accepted, probability * (least - more))

    for place in starts:
        if place - 1 not in starts:  # the first of a continuation
            walk(place, 1.0)
    return found


@given(st.sets(st.integers(0, 9), min_size=1), st.integers(1, 3), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_chances_are_those_of_all_walks(starts, drafts, random):
    """Continuations of any length side by side; a step that accepts into the end of one starts nothing in the next."""
    starts = sorted(starts)
    alive = []
    for place in starts:
        left = next(end for end in itertools.count(place + 1) if end not in starts) - place - 1
        factors = [random.choice([0.0, 0.3, 0.7, 1.0]) if k < left else 0.0 for k in range(drafts)]
        alive.append(list(itertools.accumulate(factors, lambda one, other: one * other)))
    found = start_chances(torch.tensor(alive, dtype=torch.float64), torch.tensor(starts))
    expected = walked(alive, starts)
    assert found.tolist() == pytest.approx([expected[place] for place in starts], abs=1e-12)


def test_windows_come_as_often_as_their_chances():
    chance = torch.tensor([1.0, 0.5, 0.1, 0.0, 0.25])
    windows, total = 4_000, float(chance.sum())

    def shares(seed: int) -> torch.Tensor:
        order = drawn(chance, windows, torch.Generator().manual_seed(seed))
        assert len(order) == windows
        return order.bincount(minlength=5) / windows

    assert torch.equal(shares(0), shares(0))
    # a share's standard deviation is below sqrt(1/4 / windows) = 0.008; the passes make it smaller still
    assert (shares(0) - chance / total).abs().max() < 0.03
    assert (shares(0) - 0.2).abs().max() > 0.1  # what windows everywhere would give


def test_a_pass_takes_no_window_twice():
    order = drawn(torch.ones(7), 14, torch.Generator().manual_seed(0)).tolist()
    assert sorted(order[:7]) == sorted(order[7:]) == list(range(7))
    assert order[:7] != order[7:]


def started(target, out, documents=None, **changes):
    trainer = make_trainer(options_for(target, out, **{"max_steps": 8, "rounds": 2, **changes}), target, documents)
    trainer.run()
    return trainer


@pytest.mark.parametrize("more", [{}, {"lora_layers": 1}, {"token_rank": 2}], ids=["head", "layers", "tokens"])
@torch.no_grad()
def test_chances_are_of_the_head_at_hand(tiny_target, tmp_path, more):
    """Against the evaluator's acceptance, window by window."""
    with torch.enable_grad():
        trainer = started(tiny_target, tmp_path, **more)
    drafter, source = trainer.drafter, trainer.source
    (block, *_), rows = source.blocks(0), source.source.rows
    trainer.rounds.known = None
    chances, compared = trainer.rounds.chances(block), 0
    read = states = source.states(block)  # what the head reads, what the target verifies with
    if drafter.layers is not None:
        of = read, rows.document[block]
        read, states = drafter.layers.draft(*of), drafter.layers.verifier(*of)
    for place, row in enumerate(block.tolist()):
        starts = source.starts[row].nonzero()[:, 0].tolist()
        alive = []
        for t in starts:
            end = next(end for end in itertools.count(t + 1) if end not in starts)
            at = torch.arange(t, min(t + source.window, end))
            # x_1 is given: nothing is asked of the target at its place, where the head reads
            given = torch.cat([read[place, t][None], states[place, at[1:]]])[None]
            kept = torch.zeros(source.window - 1)
            if len(at) > 1:
                tokens = rows.tokens[row, at + 1][None].long()
                kept[: len(at) - 1] = acceptance(drafter.head, tiny_target, given, tokens, Sampling(1.0))[0]
            alive.append(kept.tolist())
        expected = walked(alive, starts)
        for t in starts:
            assert chances[place, t].item() == pytest.approx(expected[t], abs=2e-3)  # kept as float16
            compared += 1
    assert compared > 50
    assert 0.2 < chances[chances > 0].float().mean() < 0.95  # some drafts are accepted, some are not


@torch.no_grad()
def test_chances_of_a_backbone_are_the_evaluator_s(tiny_target, tmp_path):
    rng = np.random.default_rng(0)
    documents = Documents.join([(rng.integers(0, V, 40), np.ones(40, bool)) for _ in range(8)])  # each a row
    with torch.enable_grad():
        trainer = started(tiny_target, tmp_path, documents, **BACKBONE)
    (block, *_), rows = trainer.source.blocks(0), trainer.source.source.rows
    trainer.rounds.known = None
    chances = trainer.rounds.chances(block).double()
    tokens, document = rows.tokens[block].long(), rows.document[block]
    size = torch.full((len(block),), tokens.shape[1])
    samples = Samples(tokens, tiny_target.hidden(tokens, document)[:, :-1], torch.ones_like(size), size)
    head = trainer.drafter.head
    contexts = collect(head, tiny_target, with_backbone(samples, head, tiny_target), Sampling(1.0))
    expected = step_starts(contexts.text)
    assert expected.shape[1] > 30
    torch.testing.assert_close(chances[:, : expected.shape[1]], expected, atol=2e-3, rtol=0)  # kept as float16


def test_the_first_round_is_as_without(tiny_target, tmp_path):
    started(tiny_target, tmp_path / "two")
    started(tiny_target, tmp_path / "one", rounds=1)
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert one[:4] == two[:4]
    assert all(without != within for without, within in zip(one[4:], two[4:], strict=True))


@pytest.mark.parametrize(
    "more",
    [{}, {"block_rows": 100}, {"lora_layers": 1}, BACKBONE],
    ids=["head", "one-block", "layers", "backbone"],
)
def test_a_run_goes_on_within_a_later_round(tiny_target, tmp_path, more, monkeypatch):
    """Saved at step 6 of 9, within round 2; the chances in use then are of the head at step 4."""
    case = {"max_steps": 9, "rounds": 2, **more}
    started(tiny_target, tmp_path / "whole", **case)
    killed = save_every(make_trainer(options_for(tiny_target, tmp_path / "killed", **case), tiny_target), 6)
    update = killed._update

    def until_the_eighth(*args, **kwargs):
        if killed.step == 7:
            raise KeyboardInterrupt
        return update(*args, **kwargs)

    monkeypatch.setattr(killed, "_update", until_the_eighth)
    with pytest.raises(KeyboardInterrupt):
        killed.run()
    assert state.read_state(tmp_path / "killed" / "state")["drawn"]["round"] == 2
    again = started(tiny_target, tmp_path / "killed", resume=True, **case)
    assert again.step == 9
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")


def test_a_state_from_before_there_were_rounds(tiny_target, tmp_path):
    started(tiny_target, tmp_path, rounds=1, max_steps=2)
    file = tmp_path / "state" / state.FILE
    values = torch.load(file, weights_only=True)
    del values["options"]["rounds"], values["drawn"]
    torch.save(values, file)
    assert started(tiny_target, tmp_path, rounds=1, max_steps=3, resume=True).step == 3
    with pytest.raises(CheckpointError, match="is of a run with rounds=1, not 2"):
        started(tiny_target, tmp_path, rounds=2, max_steps=4, resume=True)


def test_refused_for_ptp():
    with pytest.raises(UsageError, match="rounds is an option of circuits: remove rounds, or set another head"):
        parse({"target": "none", "data": ["none"], "out": "none", "head": "ptp", "rounds": 2})
