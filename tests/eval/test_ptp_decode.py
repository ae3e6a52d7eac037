"""Text of a seed is the same with and without drafts, whatever the drafts are."""

from __future__ import annotations

import pytest
import torch

from tests.support.tiny import llama_target
from tests.support.tiny_ptp import VARIANTS, continue_prompt, random_student
from vllm_mtpc.errors import UsageError
from vllm_mtpc.eval.decode import decode
from vllm_mtpc.eval.ptp_acceptance import Coupling, request_u
from vllm_mtpc.eval.text import Sampling
from vllm_mtpc.hf import Session

PROMPT = torch.tensor([1, 2, 3])
WAYS = [Sampling(1.0), Sampling(0.8, 0.9, top_k=12), Sampling(0.0)]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("sampling", WAYS)
def test_drafts_do_not_change_the_text(variant, sampling):
    student = random_student(llama_target(), variant)
    for seed in (0, 1):
        plain = continue_prompt("stp", student, PROMPT, 40, sampling, seed)
        assert len(plain.tokens) == 40 and plain.tokens_per_step == 1
        for drafts in (1, 2, 4):
            drafted = continue_prompt("speculative", student, PROMPT, 40, sampling, seed, drafts)
            assert drafted.tokens == plain.tokens and drafted.nats == pytest.approx(plain.nats, abs=1e-4)
            assert min(drafted.accepted) >= 1 and drafted.tokens_per_step >= 2  # x_2 is the target's own


@pytest.mark.parametrize("sampling", WAYS)
def test_every_number_of_accepted_drafts_leaves_the_text(sampling):
    """Drafts that are right up to a number that changes from step to step."""
    student = random_student(llama_target())
    plain = continue_prompt("stp", student, PROMPT, 60, sampling, 5).tokens
    state = {"at": 1, "step": 0}  # x_1 of the first step is the first token

    class Corrupt(Coupling):
        def draft(self, _: torch.Tensor) -> torch.Tensor:
            right = state["step"] % 5
            truth = torch.tensor((plain + [0] * 4)[state["at"] : state["at"] + 4])
            state["at"], state["step"] = state["at"] + right + 1, state["step"] + 1
            return torch.where(torch.arange(4) < right, truth, (truth + 1) % 32)

    drafted = decode("speculative", Session(student.target), PROMPT, Corrupt(student, sampling, 5), 60)
    assert drafted.tokens == plain
    assert set(drafted.accepted[:-1]) == {0, 1, 2, 3, 4}


def test_seeds_give_different_texts_and_u_is_a_hash_of_the_position():
    student = random_student(llama_target())
    texts = [continue_prompt("speculative", student, PROMPT, 30, Sampling(1.0), seed).tokens for seed in (1, 2, 1)]
    assert texts[0] == texts[2] != texts[1]
    u = request_u(Sampling(1.0), [3, 4], 0, 50, student.target.device)
    assert torch.equal(request_u(Sampling(1.0), [3], 5, 4, student.target.device)[0], u[0, 5:9])
    assert len(set(u.flatten().tolist())) == 100
    assert (request_u(Sampling(0.0), [3], 5, 4, student.target.device) == 0.5).all()


def test_unverified_drafts_are_all_kept():
    student = random_student(llama_target())
    drafted = continue_prompt("mtp", student, PROMPT, 31, Sampling(1.0), 0)
    assert set(drafted.accepted) == {4} and len(drafted.tokens) == 31
    assert drafted.tokens != continue_prompt("stp", student, PROMPT, 31, Sampling(1.0), 0).tokens


def test_a_stop_token_ends_the_text():
    student = random_student(llama_target())
    plain = continue_prompt("stp", student, PROMPT, 40, Sampling(1.0), 0).tokens
    stop = plain[17]
    ended = continue_prompt("speculative", student, PROMPT, 40, Sampling(1.0), 0, stops={stop})
    assert ended.tokens == plain[: plain.index(stop) + 1]


def test_an_unknown_mode_is_refused():
    with pytest.raises(UsageError, match="allowed are stp, mtp, speculative"):
        continue_prompt("fast", random_student(llama_target()), PROMPT, 4, Sampling(1.0))
