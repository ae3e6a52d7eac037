"""Choosing among candidates by their u leaves the distribution of the text; choosing by acceptance does not."""

from __future__ import annotations

import itertools

import pytest
import torch

from benchmarks.paper import candidates
from benchmarks.paper.candidates import Written
from tests.support.tiny import llama_target
from tests.support.tiny_ptp import VARIANTS, oracle, random_student
from vllm_mtpc.eval.ptp_acceptance import measure_ptp
from vllm_mtpc.eval.text import Sampling, generate

V, LENGTH, TEXTS = 3, 3, 4000
PROMPT = torch.tensor([1, 2])


def chi_square(target, tokens: torch.Tensor) -> float:
    """Of the continuations in tokens[S, 2 + LENGTH] against the target's distribution, 26 degrees of freedom."""
    every = torch.tensor(list(itertools.product(range(V), repeat=LENGTH)))
    texts = torch.cat([PROMPT.expand(len(every), -1), every], 1)
    log_p = target.logits(target.hidden(texts))[:, 1:-1].log_softmax(-1)
    distribution = log_p.gather(-1, every[..., None])[..., 0].sum(1).exp().double()
    assert distribution.sum().item() == pytest.approx(1, abs=1e-5)
    powers = V ** torch.arange(LENGTH - 1, -1, -1)
    counts = torch.bincount((tokens[:, 2 : 2 + LENGTH] * powers).sum(1), minlength=V**LENGTH)
    return (((counts - TEXTS * distribution) ** 2) / (TEXTS * distribution)).sum().item()


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_choice_does_not_bias_the_text_and_an_injected_one_does(variant, monkeypatch):
    target = llama_target(vocab_size=V)
    student = random_student(target, variant, window=4)
    distribution = {}
    longest = lambda off, accepted: accepted.argmax(1)  # noqa: E731  the candidate with most accepted drafts
    for choice, choose in (("centre", candidates.choose), ("longest", longest)):
        monkeypatch.setattr(candidates, "choose", choose)
        found = Written(student, [PROMPT] * TEXTS, 6, LENGTH, Sampling(1.0), seed=1).run()
        distribution[choice] = chi_square(target, found.tokens)
    assert distribution["centre"] < 60  # 99.98 % of texts of the distribution itself
    assert distribution["longest"] > 500


def test_kept_candidate_has_more_accepted_drafts_than_the_mean(monkeypatch):
    """Of a student that is wrong near the edges of intervals: it picks at temperature 1, the target at 0.7.

    The seed is fixed. The gain is about 0.5 drafts per step; the worst candidate's is about -0.4.
    """
    gains, choose = [], candidates.choose

    def noting(off: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
        best = choose(off, accepted)
        gains.append(accepted[torch.arange(len(best)), best] - accepted.double().mean(1))
        return best

    monkeypatch.setattr(candidates, "choose", noting)
    Written(oracle("o-ptp"), [PROMPT] * 8, 4, 10, Sampling(0.7), seed=1).run()
    assert torch.cat(gains).mean() > 0.2


def test_one_candidate_is_a_merged_pass():
    target, sampling = llama_target(vocab_size=8), Sampling(1.0)
    student = random_student(target, "c-ptp")
    prompts = [torch.tensor([1, 2]), torch.tensor([3, 4, 5])] * 40
    value, error = Written(student, prompts, 1, 40, sampling).run().tokens_per_step()
    samples = generate(target, prompts, 40, sampling, torch.Generator().manual_seed(0), overhang=4, stops=set())
    figures = measure_ptp(student, samples, sampling)
    assert abs(value - figures.tokens_per_step) < 4 * (error**2 + figures.standard_error**2) ** 0.5


def test_texts_are_as_long_as_asked_and_a_student_that_is_right_is_right():
    student = oracle("o-ptp", window=3)
    prompts = [torch.tensor([1, 2]), torch.tensor([3])]
    found = Written(student, prompts, 2, 31, Sampling(1.0)).run()
    assert (found.tokens >= 0).sum(1).tolist() == [33, 32] and found.tokens[1, 0] == 3
    assert found.histogram.tolist() == [[0, 0, 10], [0, 0, 10]]  # 1 + 10 x 3 tokens
