"""The processed distribution, the intervals of u that pick its tokens, and drafts by u from an approximate one."""

from __future__ import annotations

from statistics import NormalDist

import pytest
import torch

from vllm_mtpc.config.ptp_config import PtpConfig
from vllm_mtpc.heads.ptp.distribution import (
    STEPS,
    conditional,
    draft_tokens,
    edges,
    log_likelihood,
    processed,
    u_inside,
)
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


def test_u_inside_is_uniform_for_sampled_tokens() -> None:
    """u of tokens drawn from the distribution, uniform inside their intervals, is uniform on [0, 1)."""
    generator = torch.Generator().manual_seed(1)
    log_q = processed(LOGITS[0])
    tokens = torch.multinomial(log_q.exp(), 20000, True, generator=generator)
    left, right = edges(log_q.expand(len(tokens), -1), tokens)
    u = u_inside(left, right, torch.rand(len(tokens), generator=generator)).sort().values
    steps = (torch.arange(len(u)) + 1) / len(u)
    assert (u - steps).abs().max() < 1.95 / len(u) ** 0.5  # Kolmogorov-Smirnov: passed by 99.9 % of uniform samples


TARGET = {"model_type": "llama", "hidden_size": 8, "vocab_size": 5, "num_hidden_layers": 2}
NORMAL = NormalDist()


def some(rows: int, vocab_size: int = 30, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rows, vocab_size, generator=generator)
    return logits, torch.randint(STEPS, (rows,), generator=generator).float() / STEPS


def head(**options) -> PtpConfig:
    return PtpConfig.create(**{"variant": "o-ptp", "window": 4, "target": TARGET, "verifier": "t", **options})


def written_down(logits: torch.Tensor, u: float, trust: float) -> list[float]:
    """In Python's float64, token by token."""
    probabilities = logits.double().softmax(0).tolist()
    b, below, found, total = NORMAL.inv_cdf(u + 0.5 / STEPS), 0.0, [], 0.0
    for token, mass in enumerate(probabilities):
        total += mass
        last = token == len(probabilities) - 1
        edge = 1.0 if last else NORMAL.cdf((NORMAL.inv_cdf(total) - trust * b) / (1 - trust**2) ** 0.5)
        found.append(edge - below)
        below = edge
    return found


@pytest.mark.parametrize("trust", [0.2, 0.87, 0.99])
def test_conditional_equals_its_formula(trust: float) -> None:
    """float64 against float64, up to the rounding of two inverse functions."""
    logits, u = some(50)
    u[0], u[1] = 0.0, 1 - 1 / STEPS
    wanted = [written_down(row, number, trust) for row, number in zip(logits, u.tolist(), strict=True)]
    assert (conditional(logits, u, trust) - torch.tensor(wanted, dtype=torch.double)).abs().max() < 1e-9


def test_tokens_without_mass_are_never_drafted() -> None:
    logits, u = some(500)
    gone = torch.rand(logits.shape, generator=torch.Generator().manual_seed(2)) < 0.9
    gone[:, 7] = False
    logits[gone] = -torch.inf
    logits[:100, 7], logits[:100, 8] = 3.0, torch.nan
    found = conditional(logits, u, 0.9)
    assert found.isfinite().all()
    assert not found[~(logits > -torch.inf)].any()
    assert torch.isfinite(logits.gather(-1, found.argmax(-1)[:, None])).all()


def test_likelihood_is_that_of_the_formula_with_finite_gradients() -> None:
    """float32 with edges kept 1e-6 away from 0 and 1, against float64."""
    logits, u = some(2000)
    u[:2] = torch.tensor([0.0, 1 - 1 / STEPS])
    logits[2] = torch.linspace(-80, 0, 30)  # nearly all mass on one token
    tokens = pick(logits, u)
    logits.requires_grad_()
    found = log_likelihood(logits, u, tokens, 0.87, 0.1)
    with torch.no_grad():
        wanted = 0.1 * logits.double().softmax(-1) + 0.9 * conditional(logits, u, 0.87)
    at = tokens[:, None]
    assert (found.detach().double().exp() - wanted.gather(-1, at)[:, 0]).abs().max() < 2e-4
    found.sum().backward()
    assert logits.grad.isfinite().all() and logits.grad[3:].abs().amax(-1).gt(0).all()


def test_gradient_of_the_likelihood_equals_differences() -> None:
    logits, u = some(6, vocab_size=5, seed=4)
    logits, tokens = logits.double().requires_grad_(), pick(logits, u)
    found = torch.autograd.grad(log_likelihood(logits, u, tokens, 0.8, 0.1).sum(), logits)[0]
    with torch.no_grad():
        step = 1e-2  # in float32 the likelihood is known to 1e-6, so slopes to about 1e-4
        for token in range(5):
            shift = torch.zeros(5).double()
            shift[token] = step
            rise = [log_likelihood(logits + sign * shift, u, tokens, 0.8, 0.1) for sign in (1, -1)]
            slope = (rise[0] - rise[1]).double() / (2 * step)
            assert (found[:, token] - slope).abs().max() < 5e-3


def test_drafts_follow_the_variant_of_the_config() -> None:
    logits, u = some(200, vocab_size=5)
    expected = {
        "o-ptp": logits.argmax(-1),
        "independent": logits.argmax(-1),
        "c-ptp": pick(logits, u),
        "late": conditional(logits, u, 0.8).argmax(-1),
    }
    assert len({tuple(drafts.tolist()) for drafts in expected.values()}) == 3
    for variant, drafts in expected.items():
        config = head(variant=variant, distribution_trust=0.8 if variant == "late" else None)
        assert torch.equal(draft_tokens(config, logits, u), drafts)
        assert config.picks == (variant in ("c-ptp", "late"))
