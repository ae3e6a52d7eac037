"""Figures of PTP heads on the target's text: u inside its intervals, drafts window by window, steps as a server's."""

from __future__ import annotations

import pytest
import torch

from tests.support.tiny import llama_target
from tests.support.tiny_ptp import VARIANTS, oracle, random_student
from vllm_mtpc.eval import ptp_evaluator as ptp
from vllm_mtpc.eval.evaluator import exact_counts
from vllm_mtpc.eval.text import Samples, Sampling, generate
from vllm_mtpc.heads.ptp.distribution import conditional
from vllm_mtpc.kernels.pick import pick

SAMPLED = Sampling(0.8, 0.9, top_k=20)
PROMPTS = [torch.tensor(ids) for ids in ([5, 6, 7], [1], [2, 9, 9, 9, 30], [11, 12, 13])]


def written(target, sampling=SAMPLED, tokens: int = 24, seed: int = 1, prompts=PROMPTS) -> Samples:
    generator = torch.Generator().manual_seed(seed)
    return generate(target, prompts, tokens, sampling, generator, overhang=4, stops=set())


def test_u_picks_the_text_and_is_uniform():
    target = llama_target()
    student = random_student(target)
    samples = written(target, tokens=200, prompts=PROMPTS * 8)
    u = ptp.u_of_text(student, samples, SAMPLED, seed=0)
    rows, columns = ((samples.tokens >= 0) & (torch.arange(u.shape[1]) >= samples.prompt_lengths[:, None])).nonzero().T
    log_q = SAMPLED.log_probs(target.logits(samples.hidden[rows, columns - 1]))
    assert torch.equal(pick(log_q, u[rows, columns]), samples.tokens[rows, columns])
    drawn = u[rows, columns].double()
    counts = torch.histc(drawn, 16, 0, 1)
    chi = ((counts - len(drawn) / 16) ** 2 / (len(drawn) / 16)).sum()
    assert chi < 45  # 15 degrees of freedom: one in 10,000 is above 43
    lag = torch.corrcoef(torch.stack([u[0, 5:-9], u[0, 6:-8]]))[0, 1]
    assert abs(lag) < 0.3


@pytest.mark.parametrize("variant", [*VARIANTS, "independent", "late"])
@pytest.mark.parametrize("sampling", [SAMPLED, Sampling(0.0)])
def test_batched_windows_equal_single_windows(variant, sampling, monkeypatch):
    """Batched, in chunks of a few windows, against one window at a time."""
    target = llama_target()
    student = random_student(target, variant)
    student.layers.late = None  # only the drafts of its rows; another test covers the network
    samples = written(target, sampling)
    monkeypatch.setattr(ptp, "CHUNK_ELEMENTS", 2000)
    windows = ptp.collect(student, samples, sampling, num_drafts=3, seed=7)
    assert (windows.shuffled is windows.right) == (sampling.greedy or variant == "independent")  # drafted once
    u = ptp.u_of_text(student, samples, sampling, seed=7)
    assert sampling.greedy == bool((u == 0.5).all())
    checked = 0
    for row in range(len(PROMPTS)):
        first, valid = len(PROMPTS[row]) - 1, windows.valid[row]
        for column in range(int(valid.sum())):
            t = first + column
            prefix = student.prefix(samples.tokens[row : row + 1, : t + 1])
            numbers = u[row, t + 1 : t + 6][None]
            logits = student.logits(student.aux(prefix, torch.tensor([0]), torch.tensor([t]), numbers))[0]
            logits, numbers = logits[student.first_row :][:3], u[row, t + 2 : t + 5]
            if sampling.greedy or variant in ("o-ptp", "independent"):
                drafts = logits.argmax(-1)
            elif variant == "late":
                drafts = conditional(logits, numbers, student.config.distribution_trust).argmax(-1)
            else:
                drafts = pick(logits, numbers)
            assert windows.right[row, column].tolist() == (drafts == samples.tokens[row, t + 2 : t + 5]).tolist()
            checked += 1
        # the last step starts where x_1 does not end the text
        assert int(valid.sum()) == 24 - 1
    assert checked == 4 * 23 and windows.right.any()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_student_that_picks_as_the_target_is_always_right(variant):
    student = oracle(variant)
    sampling = Sampling(1.0)
    samples = written(student.target, sampling, 10, prompts=[torch.tensor([1, 2]), torch.tensor([3])])
    figures = ptp.summarise(ptp.collect(student, samples, sampling))
    assert figures.tokens_per_step == 4 and figures.two_pass_tokens_per_step == 4
    assert figures.per_position == [1, 1, 1] and figures.histogram == [0, 0, 0, 1] and figures.accuracy == 1
    assert figures.shuffled_accuracy < 0.9 and figures.anywhere == 4
    assert ptp.uses_u(1.0, figures.shuffled_accuracy, figures.contexts) and not ptp.uses_u(1.0, 1.0, figures.contexts)
    few = ptp.summarise(ptp.collect(student, samples, sampling, num_drafts=2))
    assert few.tokens_per_step == 3 and few.two_pass_tokens_per_step == 3


def counted(windows: ptp.DraftedWindows, two_pass: bool = False) -> tuple[list[float], list[float], list[float]]:
    """Steps and tokens of each text, and all steps by accepted drafts."""
    starts, alive = windows.steps(two_pass)
    histogram = (starts[..., None] * exact_counts(alive)).sum((0, 1))
    return starts.sum(1).tolist(), (starts * (1 + alive.sum(-1))).sum(1).tolist(), histogram.tolist()


def test_steps_follow_each_other():
    leading = torch.tensor([[2, 0, 1, 3, 0, 1, 0], [0, 3, 0, 0, 0, 0, 0]])  # right drafts in the window at t
    right = torch.arange(3) < leading[..., None]
    windows = ptp.DraftedWindows(right, right, torch.arange(6) < torch.tensor([[6], [3]]))  # that may start a step
    assert counted(windows) == ([2, 2], [7, 5], [1, 0, 1, 2])  # first text: starts 0, 3, 7; second: 0, 1
    steps, tokens, _ = counted(windows, two_pass=True)  # first: 0 (1 + 0), 2 (1 + 2), 6; second: 0 (1 + 2)
    assert (steps, tokens) == ([2, 1], [6, 4])
