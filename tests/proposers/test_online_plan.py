"""The plan of drafts: costs, acceptance, the budget of trials, and faults of clock, head and load."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from vllm_mtpc.plan.draft_schedule import card_rates, draft_arms, prior_costs
from vllm_mtpc.plan.online_plan import CLASSES, EXPLORE, OnlinePlan, request_class

ARMS = (0, 1, 3, 7)
SIZES = 65
REQUESTS = np.eye(CLASSES)[request_class(True, 100)]
Cost = Callable[[int, int], float]  # batch, K


def cost(step: float, row: float, draft: float) -> Cost:
    return lambda batch, drafts: step + row * batch * (1 + drafts) + draft * drafts


CHEAP, DEAR, ROWS = cost(0.01, 1e-6, 1e-5), cost(0.01, 1e-6, 0.01), cost(0.01, 0.004, 1e-5)


def make_plan(prior: Cost = CHEAP, accepted: float = 0.7) -> OnlinePlan:
    table = np.array([[prior(batch, drafts) for drafts in ARMS] for batch in range(SIZES)])
    return OnlinePlan(ARMS, table, np.full((2, 7), accepted))


def serve(
    plan: OnlinePlan, took: Cost, accepted: float, steps: int, batch: int = 1, seed: int = 0, is_sampled: bool = True
) -> tuple[list[int], float, int]:
    """Run steps; return the K of each, their seconds, and the emitted tokens."""
    rng, chosen, seconds, tokens, verified = np.random.default_rng(seed), [], 0.0, 0, 0
    cumulative = accepted ** np.arange(1, 8)
    for _ in range(steps):
        drafts = plan.lookup[batch]
        hits = (rng.random((batch, 1)) < cumulative[:verified]).sum(axis=1)
        outcomes = [(request_class(True, 100), verified, int(hit)) for hit in hits] if verified else []
        elapsed = took(batch, drafts)
        if plan.finish_step(elapsed, batch, verified, drafts, True, outcomes, is_sampled):
            plan.update(batch * REQUESTS, batch)
        chosen.append(drafts)
        seconds, tokens, verified = seconds + elapsed, tokens + batch + int(hits.sum()), drafts
    return chosen, seconds, tokens


def speed(took: Cost, accepted: float, batch: int, drafts: int) -> float:
    return batch * (1 + sum(accepted**i for i in range(1, drafts + 1))) / took(batch, drafts)


@pytest.mark.parametrize("prior", [CHEAP, DEAR, ROWS], ids=["cheap", "dear", "rows"])
@pytest.mark.parametrize("took", [CHEAP, DEAR, ROWS], ids=["cheap", "dear", "rows"])
@pytest.mark.parametrize("accepted", [0.85, 0.5, 0.1])
@pytest.mark.parametrize("batch", [1, 16])
def test_best_number_of_drafts_is_found_whatever_the_prior(
    prior: Cost, took: Cost, accepted: float, batch: int
) -> None:
    """The last 3,000 steps of 6,000 reach 94 % of the speed of the best K.

    The rest are trials, and K of similar speed: acceptance after the third draft is seen in one step of 8 at 0.5.
    """
    plan = make_plan(prior, 0.7)
    serve(plan, took, accepted, 3000, batch)
    _, seconds, tokens = serve(plan, took, accepted, 3000, batch, seed=1)
    assert tokens / seconds >= 0.94 * max(speed(took, accepted, batch, k) for k in ARMS)


@pytest.mark.parametrize(("took", "accepted"), [(CHEAP, 0.85), (DEAR, 0.1)])
def test_trials_cost_at_most_their_budget(took: Cost, accepted: float) -> None:
    """The seconds that trials lose are below EXPLORE of all, and one trial that was expected to be cheaper."""
    plan = make_plan(took, accepted)
    chosen, seconds, _ = serve(plan, took, accepted, 10_000)
    speeds = {k: speed(took, accepted, 1, k) for k in ARMS}
    lost = sum(took(1, k) * (1 - speeds[k] / max(speeds.values())) for k in chosen)
    assert 0 < lost <= EXPLORE * seconds + 8 * max(took(1, k) for k in ARMS)


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_drafts_that_are_never_accepted_stop_within_100_steps(batch: int) -> None:
    plan = make_plan(cost(0.01, 1e-6, 2e-4), 0.8)
    assert plan.lookup[batch] == 7  # the card promises drafts
    serve(plan, cost(0.01, 1e-6, 2e-4), 0.0, 100, batch)
    assert plan.best[batch] == 0
    assert np.mean(np.array(serve(plan, cost(0.01, 1e-6, 2e-4), 0.0, 2000, batch)[0]) > 0) < 0.15  # trials


def test_a_chat_model_starts_with_the_best_drafts() -> None:
    """Costs of SmolLM2 (135M) on a CPU: drafts of acceptance 0.35 win for one client, lose for 16, from step 1 on."""
    arms = draft_arms(5)
    plan = OnlinePlan(arms, prior_costs(arms, None, 16, 0.037, products=1.345e8), np.full((2, 5), 0.35))
    assert (plan.lookup[1], plan.lookup[16]) == (3, 0)

    def took(batch: int, drafts: int) -> float:  # as measured: a row costs 3.9 ms, the step without any 70
        return 1e-3 * (70 + 3.9 * batch * (1 + drafts) + (3 + 0.6 * drafts if drafts else 0))

    chosen, _, _ = serve(plan, took, 0.35, 200, 16)
    assert sum(drafts == 0 for drafts in chosen) > 180  # the others are trials


@pytest.mark.parametrize(("batch", "least"), [(1, 1.03), (4, 0.97), (16, 0.96)])
def test_a_head_that_hardly_pays_costs_little_from_the_start(batch: int, least: float) -> None:
    """SmolLM2 at measured costs, the card of its own text, other text: the speed of 150 steps, of plain's.

    At best 1.08, 1 and 1. Before observed arms could confirm the prior, trials took 6 and 9 % where the best is 1.
    """
    arms, ratios = draft_arms(5), {1: (1, 1.1, 1.35, 1.45), 4: (1, 1.25, 1.54, 1.8), 16: (1, 1.55, 2.4, 3.2)}
    card, speeds = np.tile([0.5, 0.2, 0.1, 0.03, 0.02], (2, 1)), []
    for seed in range(20):
        rng, plan = np.random.default_rng(seed), OnlinePlan(arms, prior_costs(arms, None, 16, 0.037, 1.345e8), card)

        def took(batch: int, drafts: int, rng: np.random.Generator = rng) -> float:
            return 0.1 * ratios[batch][arms.index(drafts)] * np.exp(rng.normal(0, 0.1))

        _, seconds, tokens = serve(plan, took, 0.2, 150, batch, seed)
        speeds.append(0.1 * tokens / batch / seconds)
    assert np.mean(speeds) > least


def test_head_that_is_hardly_ever_accepted_is_reported() -> None:
    """From 100 first drafts on, and not a head whose drafts are accepted now and then."""
    for accepted, reported in ((0.0, True), (0.3, False)):
        plan = make_plan(cost(0.01, 1e-6, 2e-4), 0.8)
        assert plan.acceptance.rejected_share() is None
        serve(plan, cost(0.01, 1e-6, 2e-4), accepted, 200)
        assert (plan.acceptance.rejected_share() is not None) == reported


def test_times_of_trials_are_part_of_all_times() -> None:
    plan = make_plan(CHEAP, 0.85)
    _, seconds, _ = serve(plan, CHEAP, 0.85, 2000)
    taken = plan.take_times()
    assert taken["step_us"] == pytest.approx(1e6 * seconds, rel=0.01)
    assert 0 < taken["trial_us"] <= (EXPLORE + 0.01) * taken["step_us"]
    assert plan.take_times() == {"step_us": 0, "trial_us": 0}


def test_drafts_return_with_acceptance() -> None:
    """Trials find that a head, or text, has changed."""
    plan = make_plan()
    serve(plan, CHEAP, 0.0, 3000)
    chosen, _, _ = serve(plan, CHEAP, 0.85, 4000)
    assert np.mean(np.array(chosen[-500:]) == 7) > 0.9


@pytest.mark.parametrize("wrong", [0.0, -1.0, 1e9, float("nan"), float("inf")])
def test_faults_of_the_clock_and_single_slow_steps_change_no_plan(wrong: float) -> None:
    plan, steps = make_plan(), 0

    def faulty(batch: int, drafts: int) -> float:
        nonlocal steps
        steps += 1
        return wrong if steps % 7 == 3 else 1.0 if steps % 501 == 500 else CHEAP(batch, drafts)

    chosen = serve(plan, faulty, 0.85, 3000)[0]
    assert np.mean(np.array(chosen[-1000:]) == 7) > 0.9


def test_load_that_changes_in_every_step_is_planned_by_its_size() -> None:
    """At 1 request 7 drafts are best, at 64 none: rows cost."""
    took, plan, rng = cost(0.01, 0.0008, 1e-5), make_plan(), np.random.default_rng(0)
    for step in range(6000):
        batch = (1, 64)[step // 3 % 2]
        drafts = plan.lookup[batch]
        accepted = (rng.random((batch, 1)) < 0.7 ** np.arange(1, 1 + drafts)).sum(axis=1)
        outcomes = [(4, drafts, int(count)) for count in accepted] if drafts else []
        if plan.finish_step(took(batch, drafts), batch, drafts, drafts, True, outcomes):
            plan.update(batch * REQUESTS, batch)
    assert plan.lookup[1] > 0 == plan.lookup[64]


def test_costs_of_sampled_requests_are_their_own() -> None:
    """After one turn of each a plan of the other kind begins with what it knew, in turns of 300 steps."""
    plan = make_plan()
    for turn in range(4):
        for is_sampled, took, best in ((True, DEAR, 0), (False, CHEAP, 7)):
            chosen, *_ = serve(plan, took, 0.7, 300, seed=turn, is_sampled=is_sampled)
            assert turn == 0 or np.mean(np.array(chosen) == best) > 0.95, (turn, is_sampled)


def test_first_estimate_of_a_cold_engine_is_corrected() -> None:
    """Steps without drafts are slow at first, so that drafts seem to pay; later they lose a tenth and more."""
    plan = make_plan()
    serve(plan, lambda batch, drafts: 0.016 if drafts else 0.022, 0.3, 100)
    assert plan.lookup[1] > 0
    chosen, *_ = serve(plan, lambda batch, drafts: 0.016 if drafts else 0.01, 0.3, 5000)
    assert np.mean(np.array(chosen[-1000:]) == 0) > 0.9


def test_measured_costs_replace_a_wrong_prior() -> None:
    """Before a step was observed; K that is not allowed stays so."""
    plan = make_plan(lambda batch, drafts: DEAR(batch, drafts) if batch * drafts <= 24 else np.inf)
    assert plan.best[1] == 0
    plan.set_costs(1000 * make_plan(CHEAP).prior)
    plan.update(REQUESTS, 1)
    assert [ARMS[arm] for arm in plan.best[[1, 8, 64]]] == [7, 3, 0]


def test_drafts_end_where_they_gain_less_than_the_margin() -> None:
    """Also those that serve: speeds within 1.5 % of each other are noise."""

    def faster(share: float) -> Cost:  # drafts at acceptance 0.7, by this share
        return lambda batch, drafts: (batch + 1) * speed(lambda *_: share if drafts else 1.0, 0.7, 1, drafts)

    plan = make_plan(faster(1.03))
    assert (plan.best[1:] > 0).all()
    plan.set_costs(make_plan(faster(1.01)).prior)
    plan.update(REQUESTS, 1)
    assert (plan.best[1:] == 0).all()


def test_trials_respect_a_limit_inside_a_bucket() -> None:
    """3 drafts are allowed up to 6 requests; sizes 5 to 8 are one bucket, whose trials at 5 try 3 drafts."""
    plan = make_plan(lambda batch, drafts: DEAR(batch, drafts) if batch * drafts <= 18 else np.inf, 0.1)
    tried: set[int] = set()
    for seed in range(2000):  # the prior is wrong by a half: where observed arms agree with it 3 is not tried
        tried |= set(serve(plan, lambda *step: DEAR(*step) * (1.5 if step[1] else 1), 0.1, 4, batch=5, seed=seed)[0])
        assert all(batch * drafts <= 18 for batch, drafts in enumerate(plan.lookup)), plan.trial
    assert 3 in tried and np.isfinite(plan.estimate(REQUESTS)[1]).all()


def test_card_and_arms() -> None:
    assert [draft_arms(most) for most in (1, 2, 3, 6, 7, 8)] == [
        (0, 1), (0, 1, 2), (0, 1, 3), (0, 1, 3, 6), ARMS, (0, 1, 3, 7, 8),
    ]  # fmt: skip
    rates = card_rates({"t1": [0.8, 0.4, 0.0, 0.0]}, 5)
    assert rates.tolist() == [pytest.approx([0.8, 0.5, 0.02, 0.5, 0.5])] * 2
    assert request_class(True, 70_000) == CLASSES - 1
