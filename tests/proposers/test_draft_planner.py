"""Drafts planned and pruned on V1: plans follow measured costs, pruning leaves the output distribution unchanged."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.distributions import noise_floor, total_variation
from vllm_mtpc.proposers.v1.draft_planner import (
    SAMPLED,
    Acceptance,
    Confidence,
    Costs,
    DraftPlanner,
    card_rates,
    draft_features,
    step_features,
)

VOCAB, DRAFTS, COUNT = 3, 3, 100_000
LEAST = 0.35


def test_leading_drafts_are_kept() -> None:
    """A min_acceptance of 0 prunes nothing."""
    planner = DraftPlanner(np.full((2, 3), 0.8), 0.1, 0.5)
    confidence = np.array([[0.9, 0.5, 0.9], [0.4, 1.0, 1.0], [1.0, 0.9, 0.6]])
    lengths = planner.lengths(confidence, np.array([1, 1, 1]), 0.5)
    assert lengths == [3, 3, 3]  # 0.8, 0.64, 0.51: every lift is 1
    planner.acceptance.lifts[1] = [0.2, 0.2, 0.2, 0.2, 0.5, 0.7, 0.9, 1.0, 1.2]
    assert planner.lengths(confidence, np.array([1, 1, 1]), 0.5) == [1, 0, 2]
    planner = DraftPlanner(np.full((2, 3), 0.02), 5.0, 0.0)
    assert planner.plan(64, 0, 3) == (3, 0.0)
    assert planner.lengths(np.full((2, 3), 1e-6), np.array([0, 1]), 0.0) == [3, 3]


def test_confidence_is_recorded() -> None:
    probs = torch.tensor([[0.7, 0.2, 0.1], [0.7, 0.2, 0.1], [1.0, 0.0, 0.0]])
    confidence = Confidence(5, 2)
    confidence.record_sample(1, probs, torch.tensor([True, False, False]))
    confidence.record_argmax(0, probs.log())
    np.testing.assert_allclose(confidence.read(3, 2), [[0.7, 0.7], [0.7, 0.54**0.5], [1.0, 1.0]], rtol=1e-6)


def test_rates_come_from_the_card() -> None:
    """Acceptance of draft k from P(the first k are accepted); 0.5 where it was not measured at any temperature."""
    rates = card_rates({"t1": [0.8, 0.4, 0.3]}, 4)
    np.testing.assert_allclose(rates, [[0.8, 0.5, 0.75, 0.5]] * 2)
    np.testing.assert_allclose(card_rates({}, 2), 0.5)


@pytest.mark.parametrize("is_sharp", [False, True])
def test_acceptance_is_learnt(is_sharp: bool) -> None:
    """A card that is far off, and confidences that mean little (a flat target) or all (a sharp one): within 0.06."""
    generator = np.random.default_rng(0)
    acceptance, kind = Acceptance(card_rates({"t0": [0.1, 0.01]}, 2)), np.array([0, 0, 0, 0])
    for _ in range(600):
        confidence = generator.uniform(0.02, 0.3, (4, 2))
        chance = np.where(confidence > 0.12, 0.9, 0.3) if is_sharp else np.full((4, 2), 0.6)
        accepted = (generator.random((4, 2)) < chance).cumprod(axis=1).sum(axis=1)
        acceptance.observe(kind, confidence, np.full(4, 2), accepted)
    both = acceptance.cumulative(np.array([[0.2, 0.2], [0.1, 0.1]]), np.array([0, 0]))
    wanted = [[0.9, 0.81], [0.3, 0.09]] if is_sharp else [[0.6, 0.36]] * 2
    np.testing.assert_allclose(both, wanted, atol=0.06)
    np.testing.assert_allclose(acceptance.rates[1], 0.1)  # sampled requests were not seen: the card's figures


def test_unverified_drafts_are_not_counted() -> None:
    acceptance = Acceptance(np.full((2, 3), 0.5))
    acceptance.observe(np.array([1]), np.full((1, 3), 0.4), np.array([2]), np.array([0]))
    assert acceptance.rates[1, 0] < 0.5  # rejected
    assert acceptance.rates[1, 1] == acceptance.rates[1, 2] == 0.5  # after it, and not verified


def machine(row: float, draft: float) -> Callable[[int, int], tuple[float, float]]:
    """Seconds of a step and of its draft, by requests and drafts of each."""
    return lambda batch, drafts: (0.05 + row * batch * (1 + drafts), draft * batch * drafts)


def measure(planner: DraftPlanner, batch: int, took: Callable, order: tuple = (7, 0, 3, 7, 0, 7, 5, 0) * 4) -> Costs:
    """Learn from steps with so many drafts of a sampled batch."""
    costs = planner._costs_for(batch, True)
    for drafts in order:
        step, drafting = took(batch, drafts)
        costs.steps.observe(step_features(batch, batch * (1 + drafts), drafts > 0), step)
        if drafts:
            costs.drafts.observe(draft_features(batch, drafts), drafting)
        planner._learn(costs)
    return costs


@pytest.mark.parametrize(("row", "draft"), [(0.0005, 0.0001), (0.02, 0.001), (0.001, 0.05)])
@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("accepted", [0.15, 0.6, 0.95])
def test_plan_is_best_on_an_unusual_machine(row: float, draft: float, batch: int, accepted: float) -> None:
    """Ten times slower than the constants', with other proportions: within 3 % of the best K; none for small gains."""
    took, acceptance = machine(row, draft), accepted ** np.arange(1, 8)
    planner = DraftPlanner(np.full((2, 7), accepted), 0.1)
    measure(planner, batch, took)
    speed = [batch * (1 + acceptance[:drafts].sum()) / sum(took(batch, drafts)) for drafts in range(8)]
    chosen, margin = planner._find_best(0, batch, 7).drafts, 1.03 if batch == 1 else 1.1
    assert speed[chosen] >= 0.97 * max(speed) or (chosen == 0 and max(speed) < margin * speed[0] / 0.97)


@pytest.mark.parametrize(("accepted", "load", "usual"), [(0.02, 9.0, 0), (0.98, 0.1, 7), (0.5, 0.1, 3)])
def test_trials_lose_a_small_share_of_the_time(accepted: float, load: float, usual: int) -> None:
    """A useless head is tried, and one that is nearly always right goes without a draft, at a loss of at most 2 %.

    Where there are two things to try, the dearer one has its turns too.
    """
    planner = DraftPlanner(np.full((2, 7), accepted), load)
    plans = [planner.plan(1, 0, 7)[0] for _ in range(3000)]
    plan = planner._find_best(1, 0, 7)
    assert plan.drafts == usual
    tries = [drafts for drafts in plans if drafts != usual]
    assert len(tries) >= 8
    assert set(tries) == set(dict(plan.trials))
    assert sum(dict(plan.trials)[drafts] for drafts in tries) <= 0.02 * 3000 * plan.seconds


def learnt(at: range, jump: float = 0.0) -> np.ndarray:
    """Return the weights after 40 steps, with `jump` seconds measured for steps `at`."""
    costs = Costs(0.1)
    for turn in range(40):
        step, draft = (jump, jump) if turn in at else (0.02, 0.004)
        costs.steps.observe(step_features(4, 32, True), step)
        costs.drafts.observe(draft_features(4, 7), draft)
        costs.learn(lambda weights: weights)
        assert np.isfinite(costs.weights()).all() and costs.weights().max() < 1.0
    return costs.weights()


@pytest.mark.parametrize("jump", [3600.0, -3600.0, -1e-9, 1e-9, 0.0])
@pytest.mark.parametrize("at", [0, 1, 20])
def test_clock_jumps_are_ignored(jump: float, at: int) -> None:
    """An hour for the first draft that counts would keep others from being tried for weeks."""
    np.testing.assert_allclose(learnt(range(at, at + 1), jump), learnt(range(0)), rtol=0.01)


@pytest.mark.parametrize(("at", "rtol"), [(range(1), 0.01), (range(10, 40, 20), 0.1)])
def test_slow_first_step_is_ignored_and_delayed_ones_have_little_weight(at: range, rtol: float) -> None:
    """The first one pays for what is made once."""
    np.testing.assert_allclose(learnt(at, 0.5), learnt(range(0)), rtol=rtol)


def test_ranks_learn_in_the_same_steps_with_other_clocks() -> None:
    """They meet to share what was learnt: one that comes more rarely would leave the others waiting."""
    steady, jumping = Costs(0.1).steps, Costs(0.1).steps
    for turn in range(100):
        features = step_features(1, 8, turn % 3 > 0)
        assert steady.observe(features, 0.01) == jumping.observe(features, 0.01 if turn % 2 else -3600.0)
        assert steady.is_known == jumping.is_known


def test_losing_plan_is_dropped_soon() -> None:
    """The costs of another size predict a gain, until a step without drafts is measured."""
    planner, accepted = DraftPlanner(np.full((2, 5), 0.55), 0.1), 0.55 ** np.arange(1, 6)
    measure(planner, 4, lambda batch, drafts: (0.0095, 0.001), (5, 0, 5, 5, 0, 5, 3, 5))  # rows seem to cost nothing

    def took(batch: int, drafts: int) -> tuple[float, float]:
        return 0.0071 if drafts == 0 else 0.009 + 0.0002 * 12 * (1 + drafts), 0.005

    plans: list[int] = []
    for _ in range(30):
        plans.append(planner.plan(0, 12, 5)[0])
        measure(planner, 12, took, (plans[-1],))
    assert plans[0] > 0 and 1 + accepted.sum() < (0.009 + 0.0002 * 72 + 0.005) / 0.0071  # it did, and does not
    assert all(plans[:4]) and plans.count(0) >= 20  # a few more drafted steps, some of them tries


def test_new_batch_size_takes_costs_of_the_nearest() -> None:
    """Of sampled batches for a sampled one, even if greedy ones are nearer in size; then of the nearest size."""
    planner = DraftPlanner(np.full((2, 7), 0.5), 0.1)
    measure(planner, 1, machine(0.001, 0.05))  # a slow machine, an expensive head: no draft of 12 is needed
    assert planner._find_best(0, 12, 7).drafts == 0
    planner = DraftPlanner(np.full((2, 7), 0.5), 0.1)
    for batch, is_drawn, seconds in ((4, True, 0.01), (64, True, 0.1), (8, False, 1.0)):
        costs = planner._costs_for(batch, is_drawn)
        for _ in range(8):
            costs.steps.observe(step_features(8, 8, False), seconds)
        planner._learn(costs)
    assert planner._costs_for(8, True).step(8, 8, False) == pytest.approx(0.01, rel=0.1)


def conditional(tokens: Tensor, seed: int, scale: float) -> Tensor:
    """p(. | tokens [B, j]) [B, V], drawn from a seed; surer with a larger scale."""
    tables = torch.randn(DRAFTS + 1, VOCAB ** (DRAFTS + 1), VOCAB, generator=torch.Generator().manual_seed(seed))
    index = tokens @ (VOCAB ** torch.arange(tokens.shape[1]))
    return tables[tokens.shape[1]][index].mul(scale).softmax(-1)


def target_distribution(tokens: Tensor) -> Tensor:
    return conditional(tokens, 3, 0.7)


def draw(probs: Tensor, generator: torch.Generator) -> Tensor:
    return torch.multinomial(probs, 1, generator=generator)[:, 0]


def speculate(by_token: bool) -> Tensor:
    """[COUNT, DRAFTS + 1] tokens: one step of drafts, cut and verified, then the target's own."""
    generator = torch.Generator().manual_seed(0)
    confidence, distributions, drafts = Confidence(COUNT, DRAFTS), [], torch.zeros(COUNT, 0, dtype=torch.long)
    for k in range(DRAFTS):
        distributions.append(conditional(drafts, 4, 2.0))  # of a drafter that is much surer than the target
        token = draw(distributions[-1], generator)
        confidence.record_sample(k, distributions[-1], torch.zeros(COUNT, dtype=torch.bool))
        if by_token:  # the fault: the probability of the sampled token
            confidence.values[:, k] = distributions[-1].gather(1, token[:, None])[:, 0]
        drafts = torch.cat([drafts, token[:, None]], dim=1)
    planner = DraftPlanner(np.full((2, DRAFTS), 0.9), 0.1, LEAST)
    planner.acceptance.lifts[SAMPLED] = [0.1, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0, 1.1]  # as if learnt
    length = torch.tensor(planner.lengths(confidence.read(COUNT, DRAFTS), np.full(COUNT, SAMPLED), LEAST))
    assert length.unique().numel() > 1  # some are cut, and not all alike
    tokens, running = torch.zeros(COUNT, 0, dtype=torch.long), torch.ones(COUNT, dtype=torch.bool)
    for k in range(DRAFTS + 1):
        p = target_distribution(tokens)
        token = draw(p, generator)  # after the drafts: a bonus token, and then plain decoding
        if k < DRAFTS:
            q, draft = distributions[k], drafts[:, k]
            chance = p.gather(1, draft[:, None])[:, 0] / q.gather(1, draft[:, None])[:, 0]
            accepted = torch.rand(COUNT, generator=generator) < chance
            residual = (p - q).clamp(min=0) + 1e-12
            verified = torch.where(accepted, draft, draw(residual, generator))
            token = torch.where(running & (k < length), verified, token)
            running &= accepted & (k < length)
        tokens = torch.cat([tokens, token[:, None]], dim=1)
    return tokens


@pytest.mark.parametrize("by_token", [False, True])
def test_pruning_keeps_the_distribution_unless_it_depends_on_the_token(by_token: bool) -> None:
    outcomes = torch.tensor(list(itertools.product(range(VOCAB), repeat=DRAFTS + 1)))
    distribution = torch.ones(len(outcomes), dtype=torch.float64)
    for k in range(DRAFTS + 1):
        distribution *= target_distribution(outcomes[:, :k]).double().gather(1, outcomes[:, k : k + 1])[:, 0]
    distance = total_variation(speculate(by_token).tolist(), distribution.numpy(), VOCAB)
    floor = noise_floor(distribution.numpy(), COUNT)
    print(f"by token {by_token}: TV {distance:.5f}, allowed {floor:.5f}")
    assert distance > 2 * floor if by_token else distance < floor
