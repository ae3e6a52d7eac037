"""Pruning by confidence on Model Runner V1: what is kept, and that the output distribution does not depend on it."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tests.support.distributions import noise_floor, total_variation
from vllm_mtpc.proposers.v1.proposer import confidence_of, likely_lengths

VOCAB, DRAFTS, COUNT, LEAST = 3, 3, 100_000, 0.6


def test_leading_likely_drafts_are_kept() -> None:
    confidence = torch.tensor([[0.9, 0.5, 0.9], [0.4, 1.0, 1.0], [1.0, 0.9, 0.6]])
    assert likely_lengths(confidence, 0.5).tolist() == [1, 0, 3]
    assert likely_lengths(confidence, 0.0).tolist() == [3, 3, 3]


def test_confidence_is_the_most_likely_token_or_the_norm() -> None:
    probs = torch.tensor([[0.7, 0.2, 0.1], [0.7, 0.2, 0.1], [1.0, 0.0, 0.0]])
    torch.testing.assert_close(
        confidence_of(probs, torch.tensor([True, False, False])), torch.tensor([0.7, 0.54**0.5, 1.0])
    )


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
    confidence, distributions, drafts = torch.ones(COUNT, DRAFTS), [], torch.zeros(COUNT, 0, dtype=torch.long)
    for k in range(DRAFTS):
        distributions.append(conditional(drafts, 4, 2.0))  # of a drafter that is much surer than the target
        token = draw(distributions[-1], generator)
        confidence[:, k] = confidence_of(distributions[-1], torch.zeros(COUNT, dtype=torch.bool))
        if by_token:  # the fault: the probability of the sampled token
            confidence[:, k] = distributions[-1].gather(1, token[:, None])[:, 0]
        drafts = torch.cat([drafts, token[:, None]], dim=1)
    length = likely_lengths(confidence, LEAST)
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
