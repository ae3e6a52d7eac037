"""The processed distribution and the intervals of u: vLLM's rule, and every u inside an interval picks its token."""

from __future__ import annotations

import pytest
import torch

from vllm_mtpc.heads.ptp.distribution import STEPS, edges, processed, u_inside
from vllm_mtpc.kernels.pick import pick

LOGITS = torch.randn(40, 60, generator=torch.Generator().manual_seed(0)) * 3


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.3, 7, 1.0), (1.0, 0, 0.8), (0.7, 9, 0.6)]
)
def test_the_distribution_is_that_of_transformers(temperature: float, top_k: int, top_p: float) -> None:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    wanted = TemperatureLogitsWarper(temperature)(None, LOGITS)
    wanted = TopKLogitsWarper(top_k)(None, wanted) if top_k else wanted
    wanted = TopPLogitsWarper(top_p)(None, wanted) if top_p < 1 else wanted
    log_q = processed(LOGITS, temperature, top_k, top_p)
    torch.testing.assert_close(log_q, wanted.log_softmax(-1))
    assert torch.isinf(log_q).any() == (top_k > 0 or top_p < 1)


def test_tokens_that_tie_with_the_last_of_top_k_stay_and_one_token_always_does() -> None:
    ties = torch.tensor([[1.0, 2.0, 1.0, 0.0]])
    assert torch.isfinite(processed(ties, 1.0, 2)).tolist() == [[True, True, True, False]]
    assert torch.isfinite(processed(LOGITS, 1.0, 0, 1e-9)).sum(-1).eq(1).all()
    assert torch.equal(processed(LOGITS, 1.0, 0, 1e-9).argmax(-1), LOGITS.argmax(-1))


@pytest.mark.parametrize("inner", [0.0, 0.3, 1 - 2**-24])
def test_u_inside_an_interval_picks_its_token(inner: float) -> None:
    for log_q in (processed(LOGITS, 0.7, 20), processed(LOGITS * 4)):
        tokens = torch.arange(log_q.shape[-1]).expand(len(log_q), -1)
        left, right = edges(log_q[:, None].expand(-1, log_q.shape[-1], -1), tokens)
        u = u_inside(left, right, torch.full_like(left, inner).float())
        assert u.dtype == torch.float32 and ((u >= 0) & (u < 1)).all()
        assert torch.equal(u.double() * STEPS, (u.double() * STEPS).floor())
        holds = (right * STEPS).ceil() - 1 >= (left * STEPS).ceil()
        assert holds.any() and not holds.all()  # both kinds occur
        rows = log_q[:, None].expand(-1, log_q.shape[-1], -1)[holds]
        assert (log_q.exp() > 1e-3).sum() > 100 and torch.equal(pick(rows, u[holds]), tokens[holds])


def test_intervals_cover_zero_to_one_in_vocabulary_order() -> None:
    log_q = processed(LOGITS, 1.0, 5)
    tokens = torch.arange(log_q.shape[-1]).expand(len(log_q), -1)
    left, right = edges(log_q[:, None].expand(-1, log_q.shape[-1], -1), tokens)
    assert torch.equal(left[:, 1:], right[:, :-1])
    assert left[:, 0].eq(0).all() and right[:, -1].eq(1).all()
    torch.testing.assert_close((right - left).float(), log_q.exp(), rtol=1e-4, atol=1e-6)
    assert ((right - left) == 0)[torch.isinf(log_q)].all()


def test_u_inside_is_uniform_for_sampled_tokens() -> None:
    """u of tokens drawn from the distribution, uniform inside their intervals, is uniform on [0, 1)."""
    generator = torch.Generator().manual_seed(1)
    log_q = processed(LOGITS[0])
    tokens = torch.multinomial(log_q.exp(), 20000, True, generator=generator)
    left, right = edges(log_q.expand(len(tokens), -1), tokens)
    u = u_inside(left, right, torch.rand(len(tokens), generator=generator)).sort().values
    steps = (torch.arange(len(u)) + 1) / len(u)
    assert (u - steps).abs().max() < 1.95 / len(u) ** 0.5  # Kolmogorov-Smirnov: passed by 99.9 % of uniform samples
