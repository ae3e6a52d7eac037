"""`rejection_sample` of Model Runner V1: its distribution, a fault that must be found, and vLLM's rules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from vllm_mtpc.proposers.v1.verification import NONE, rejection_sample

V, REQUESTS = 6, 20_000
GENERATOR = torch.Generator().manual_seed(0)
P = torch.randn(2, V, generator=GENERATOR).softmax(-1)  # of the token after the prompt, and of the next
Q = torch.randn(2, V, generator=GENERATOR).softmax(-1)
Q[0, 2] = 0  # an id that is not drafted
Q /= Q.sum(-1, keepdim=True)


def metadata(temperature: Tensor, generators: dict[int, torch.Generator] | None = None) -> Any:
    return SimpleNamespace(temperature=temperature, generators=generators or {})


def verified(q: Tensor | None = Q, served: Tensor = Q) -> Tensor:
    """Tokens of requests with two drafts of `served`, verified as drafts of `q`."""
    drafts = torch.multinomial(served, REQUESTS, replacement=True, generator=GENERATOR).T.contiguous()
    ends = 2 * torch.arange(1, REQUESTS + 1)
    logits = P.log().repeat(REQUESTS, 1)
    probs = None if q is None else q.repeat(REQUESTS, 1)
    bonus = torch.zeros(REQUESTS, 1, dtype=torch.int32)
    given = drafts.flatten().int(), [2] * REQUESTS, 2, ends, probs, logits, bonus
    return rejection_sample(*given, metadata(torch.ones(REQUESTS)))


def p_values(tokens: Tensor) -> list[float]:
    """Of the first token, and of the second where the first was accepted."""
    first, second = tokens[:, 0], tokens[tokens[:, 1] != NONE, 1]
    counts = [torch.bincount(some.long(), minlength=V).numpy() for some in (first, second)]
    return [chisquare(count, row.double().numpy() / row.double().sum().item() * count.sum()).pvalue
            for count, row in zip(counts, P, strict=True)]  # fmt: skip


@pytest.mark.parametrize("q", [Q, None])
def test_tokens_have_the_targets_distribution(q: Tensor | None) -> None:
    """Also where drafts are certain; 1e-4: this test has two values and a fixed seed."""
    torch.manual_seed(1)
    served = Q if q is not None else torch.eye(V)[[1, 4]]
    assert min(p_values(verified(q, served))) > 1e-4


def test_wrong_q_is_found() -> None:
    torch.manual_seed(1)
    assert min(p_values(verified(0.85 * Q + 0.15 / V))) < 1e-6


def test_as_many_drafts_are_accepted_as_possible() -> None:
    torch.manual_seed(1)
    accepted = (verified() != NONE).sum(1) - 1
    first, both = torch.minimum(P, Q).sum(-1).cumprod(0).tolist()
    for share, wanted in ((accepted >= 1, first), (accepted >= 2, both)):  # four standard errors
        assert abs(share.float().mean().item() - wanted) < 4 * (wanted * (1 - wanted) / REQUESTS) ** 0.5


def test_greedy_rows_requests_without_drafts_and_padding() -> None:
    """A greedy request's argmax; no drafts: the bonus token; a draft of -1 is rejected."""
    logits = torch.full((5, V), -9.0)
    logits[range(5), [1, 2, 3, 4, 5]] = 9.0
    drafts, counts = torch.tensor([1, 0, 3, NONE, 5], dtype=torch.int32), [2, 0, 2, 1]
    ends = torch.tensor(counts).cumsum(0)
    bonus = torch.tensor([[0], [4], [0], [0]], dtype=torch.int32)
    given = drafts, counts, 2, ends, torch.eye(V)[drafts.long().clamp(min=0)], logits, bonus
    found = rejection_sample(*given, metadata(torch.tensor([0.0, 1.0, 1.0, 0.0])))
    assert found.tolist() == [[1, 2, NONE], [4, NONE, NONE], [3, 4, NONE], [5, 0, NONE]]
    assert bonus.flatten().tolist() == [0, 4, 0, 0]  # coupling reads it afterwards


def test_a_request_with_a_seed_repeats_in_another_batch() -> None:
    """Verified by rejection it draws from its own generator alone, and nothing in a step without drafts."""
    logits, drafts = torch.randn(6, V, generator=GENERATOR), torch.tensor([1, 2, 3, 0, 4, 5], dtype=torch.int32)
    q, bonus = torch.full((6, V), 1 / V), torch.zeros(3, 1, dtype=torch.int32)
    found = []
    for counts in ([3, 0, 3], [3, 0, 0]):
        seeded = {0: torch.Generator().manual_seed(5), 1: torch.Generator().manual_seed(5)}
        state, total = seeded[1].get_state(), sum(counts)
        given = drafts[:total], counts, 3, torch.tensor(counts).cumsum(0), q[:total], logits[:total], bonus
        found.append(rejection_sample(*given, metadata(torch.ones(3), seeded))[0].tolist())
        assert torch.equal(seeded[1].get_state(), state)
    assert found[0] == found[1]
