"""Figures of PTP heads on the target's text: u inside its intervals, drafts window by window, steps as a server's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.tiny import llama_target
from tests.support.tiny_ptp import VARIANTS, continue_prompt, oracle, random_student
from vllm_mtpc.eval import ptp_acceptance as ptp
from vllm_mtpc.eval.metrics import exact_counts
from vllm_mtpc.eval.ptp_acceptance import request_u
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
    student.late = None  # only the drafts of its rows; another test covers the network
    samples = written(target, sampling)
    monkeypatch.setattr(ptp, "CHUNK_ELEMENTS", 2000)
    monkeypatch.setattr(ptp, "PREFIX_ELEMENTS", 10000)
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
    figures = ptp.measure_ptp(student, samples, sampling)
    assert figures.tokens_per_step == 4 and figures.two_pass_tokens_per_step == 4
    assert figures.per_position == [1, 1, 1] and figures.histogram == [0, 0, 0, 1] and figures.accuracy == 1
    assert figures.shuffled_accuracy < 0.9 and figures.anywhere == 4
    assert ptp.uses_u(figures) and not ptp.uses_u(replace(figures, shuffled_accuracy=1.0))
    few = ptp.measure_ptp(student, samples, sampling, num_drafts=2)
    assert few.tokens_per_step == 3 and few.two_pass_tokens_per_step == 3


def counted(windows: ptp.Windows, two_pass: bool = False) -> tuple[list[float], list[float], list[float]]:
    """Steps and tokens of each text, and all steps by accepted drafts."""
    starts, alive = windows.steps(two_pass)
    histogram = (starts[..., None] * exact_counts(alive)).sum((0, 1))
    return starts.sum(1).tolist(), (starts * (1 + alive.sum(-1))).sum(1).tolist(), histogram.tolist()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("sampling", [SAMPLED, Sampling(0.0)])
def test_two_passes_are_predicted_to_the_step(variant, sampling):
    """With the u that the decoding loop draws by hash, the prediction equals its counters."""
    target = llama_target(vocab_size=12)
    student, seeds = random_student(target, variant), (3, 4, 5, 6)
    longer = [continue_prompt(student, p % 12, 34, sampling, s).tokens for p, s in zip(PROMPTS, seeds, strict=True)]
    tokens = [torch.cat([prompt % 12, torch.tensor(more)]) for prompt, more in zip(PROMPTS, longer, strict=True)]
    prompt_lengths = torch.tensor([len(prompt) for prompt in PROMPTS])
    padded = torch.nn.utils.rnn.pad_sequence(tokens, True, -1)
    hidden = target.hidden(padded.clamp(min=0))[:, :-1]
    samples = Samples(padded, hidden, prompt_lengths, prompt_lengths + 30)
    u = torch.nn.functional.pad(request_u(sampling, seeds, 1, padded.shape[1] - 1, target.device), (1, 0))
    windows = ptp.collect(student, samples, sampling, u=u)
    steps, tokens, histogram = counted(windows, two_pass=True)
    accepted = [continue_prompt(student, p % 12, 30, sampling, s).accepted for p, s in zip(PROMPTS, seeds, strict=True)]
    assert steps == [len(row) for row in accepted]
    assert tokens == [len(row) + sum(row) for row in accepted]
    flat = torch.tensor([count for row in accepted for count in row])
    assert histogram == torch.bincount(flat, minlength=5).tolist()


def test_drawn_u_and_seeds_give_equal_tokens_per_step():
    """Text by one generator and u drawn inside its intervals, against text picked by fresh seeds: one distribution."""
    target, sampling = llama_target(vocab_size=5, seed=4), Sampling(1.0)
    student = random_student(target, "c-ptp", window=4)
    prompts = [torch.tensor([1, 2])] * 60
    figures = ptp.measure_ptp(student, written(target, sampling, 60, prompts=prompts), sampling)
    counts = [continue_prompt(student, prompts[0], 61, sampling, seed).accepted for seed in range(16)]
    kept = torch.tensor([count for row in counts for count in row], dtype=torch.float64)
    error = (kept.var() / len(kept) + figures.two_pass_standard_error**2).sqrt()
    assert abs(1 + kept.mean() - figures.two_pass_tokens_per_step) < 4 * error
    assert figures.two_pass_tokens_per_step > 2.15  # students are right often enough to tell


def windows_of(leading: list[list[int]], steps: list[int], drafts: int) -> ptp.Windows:
    """Texts with ``leading`` right drafts in the window at t; the first ``steps`` windows may start a step."""
    right = torch.arange(drafts) < torch.tensor(leading)[..., None]
    valid = torch.arange(len(leading[0]) - 1) < torch.tensor(steps)[:, None]
    return ptp.Windows(right, right, valid)


def test_steps_follow_each_other():
    windows = windows_of([[2, 0, 1, 3, 0, 1, 0], [0, 3, 0, 0, 0, 0, 0]], [6, 3], 3)
    assert counted(windows) == ([2, 2], [7, 5], [1, 0, 1, 2])  # first text: starts 0, 3, 7; second: 0, 1
    steps, tokens, _ = counted(windows, two_pass=True)  # first: 0 (1 + 0), 2 (1 + 2), 6; second: 0 (1 + 2)
    assert (steps, tokens) == ([2, 1], [6, 4])
