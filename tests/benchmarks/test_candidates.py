"""Choosing among candidates by their u leaves the distribution of the text; choosing by acceptance does not."""

from __future__ import annotations

import pytest
import torch

from benchmarks.paper import candidates
from benchmarks.paper.candidates import Written
from tests.support.distributions import Setting, exact_distribution, is_distributed
from tests.support.tiny import llama_target
from tests.support.tiny_ptp import VARIANTS, oracle, random_student
from vllm_mtpc.eval.text import Sampling

V, LENGTH, TEXTS = 3, 3, 4000
PROMPT = torch.tensor([1, 2])


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_choice_does_not_bias_the_text_and_an_injected_one_does(variant, monkeypatch):
    """The injected choice is the candidate with most accepted drafts."""
    target = llama_target(vocab_size=V)
    student = random_student(target, variant, window=4)
    distribution = exact_distribution(target.model, PROMPT.tolist(), LENGTH, Setting())
    for is_kept in (True, False):
        if not is_kept:
            monkeypatch.setattr(candidates, "choose", lambda off, accepted: accepted.argmax(1))
        found = Written(student, [PROMPT] * TEXTS, 6, LENGTH, Sampling(1.0), seed=1).run()
        assert is_distributed(found.tokens[:, 2 : 2 + LENGTH].tolist(), distribution, V) == is_kept


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


def test_texts_are_as_long_as_asked_and_a_student_that_is_right_is_right():
    student = oracle("o-ptp", window=3)
    prompts = [torch.tensor([1, 2]), torch.tensor([3])]
    found = Written(student, prompts, 2, 31, Sampling(1.0)).run()
    assert (found.tokens >= 0).sum(1).tolist() == [33, 32] and found.tokens[1, 0] == 3
    assert found.histogram.tolist() == [[0, 0, 10], [0, 0, 10]]  # 1 + 10 x 3 tokens
