"""Losses and their gradients against brute force: the circuit enumerated in float64, gradients by central differences.

The reference shares no code with the losses: it is written from the formulas, with probabilities of whole token
sequences (tests/support/enumeration.py).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support import enumeration
from tests.support.heads_zoo import build, hidden_states
from vllm_mtpc.circuits.base import CircuitParams
from vllm_mtpc.circuits.conditionals import conditionals
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.heads.head import build_head
from vllm_mtpc.train import losses
from vllm_mtpc.train.losses import drafted_part, step_loss, window_loss
from vllm_mtpc.train.mixture import Mixture, mixture, weigher
from vllm_mtpc.train.options import TrainOptions

V, N, R, B = 3, 4, 2, 3
TOKENS = torch.tensor([[0, 2, 1, 1], [2, 0, 0, -1], [1, 1, -1, -1]])
COUNTS = (TOKENS >= 0).sum(0)
CASES = {
    "nll": {},
    "discounted": {"gamma": 0.5},
    "kl": {"beta": 1.0},
    "without_first": {"beta": 0.5, "train_first": False},
    "acceptance": {"acceptance": 1.0},
    "mixed": {"acceptance": 0.6, "beta": 0.5, "train_first": False},
}


def options(circuit: str, **changes) -> TrainOptions:
    r = 1 if circuit == "ff" else R
    values = {"beta": 0.0, "acceptance": 0.0, "train_first": True} | changes
    return TrainOptions(target="t", data=["d"], out="o", circuit=circuit, window=N, components=r, **values)


def logits_of(name: str) -> list[torch.Tensor]:
    """Raw parameters of B circuits in float64."""
    circuit, generator = enumeration.make(name, N, R), torch.Generator().manual_seed(4)
    r = circuit.num_components
    shapes = [(B, N, r, V), (B, r), (B, circuit.num_inner, r, r)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def params_of(name: str, logits: list[torch.Tensor]) -> CircuitParams:
    leaf, root, inner = (part.log_softmax(-1) for part in logits)
    return CircuitParams(leaf, root if name != "ff" else torch.zeros_like(root), inner)


def loss_of(name: str, logits: list[torch.Tensor], distribution: torch.Tensor | None, o: TrainOptions) -> torch.Tensor:
    q = Mixture.apply(*logits, None, TOKENS, weigher(enumeration.make(name, N, R), 0))
    return window_loss(q, TOKENS, TOKENS, distribution, o, COUNTS)


def target_distribution() -> torch.Tensor:
    return torch.randn(B, N, V, generator=torch.Generator().manual_seed(9), dtype=torch.float64).log_softmax(-1)


def reference(name: str, params: CircuitParams, distribution: np.ndarray, o: TrainOptions) -> float:
    """L from its definition; `distribution` [B, N, V] holds log p."""
    weights = np.array([o.gamma**k for k in range(N)])
    weights[0] *= o.train_first
    weights /= weights.sum()
    total = 0.0
    for b, tokens in enumerate(TOKENS.tolist()):
        table = enumeration.Enumerated(name, params, b).table()
        for k, token in enumerate(tokens):
            if token < 0:
                break
            q, p = np.exp(enumeration.conditionals(table, tuple(tokens[:k]))), np.exp(distribution[b, k])
            overlap = np.minimum(p, q).sum()
            term = -(1 - o.beta) * np.log(q[token]) + o.beta * (p * np.log(p / q)).sum()
            total += (1 - o.acceptance) * weights[k] * term / COUNTS[k].item()
            if k and o.acceptance:
                total += o.acceptance * weights[k] / weights[1:].sum() * (1 - overlap) / COUNTS[k].item()
    return total


@pytest.mark.parametrize("circuit", enumeration.CIRCUITS)
@pytest.mark.parametrize("case", CASES)
def test_loss_equals_enumeration(circuit, case):
    o, params = options(circuit, **CASES[case]), params_of(circuit, logits_of(circuit))
    distribution = target_distribution()
    given = distribution if o.needs_distribution else None
    loss = loss_of(circuit, logits_of(circuit), given, o)
    # 1e-7: without the target's distribution everything is float64; the posterior of a mixture is clamped at 1e-38
    # only.
    assert loss.item() == pytest.approx(reference(circuit, params, distribution.numpy(), o), abs=1e-7)


@pytest.mark.parametrize("circuit", enumeration.CIRCUITS)
@pytest.mark.parametrize("case", ["nll", "kl", "mixed"])
def test_gradient_equals_differences(circuit, case):
    o, distribution, logits = options(circuit, **CASES[case]), target_distribution(), logits_of(circuit)
    learnt = [part.requires_grad_(True) for part in logits if part.numel()]

    def loss(*parts: torch.Tensor) -> torch.Tensor:
        return loss_of(circuit, [*parts, *logits[len(parts) :]], distribution, o)

    # central differences: curvature times step^2, and rounding of order 1e-16 / step
    assert torch.autograd.gradcheck(loss, learnt, eps=1e-6, atol=1e-7, rtol=0)


@pytest.mark.parametrize("circuit", enumeration.CIRCUITS)
@pytest.mark.parametrize("skip", [0, 1])
def test_mixture_has_the_conditionals_and_their_gradient(circuit, skip):
    """With a bigram, a draft vocabulary, and a trunk that has or has not seen x_1."""
    kind = "mlp own" if skip else "linear"
    head = build(kind, circuit, std=0.5, ids=[0, 2, 3, 5], token_rank=2).requires_grad_(True)
    generator = torch.Generator().manual_seed(3)
    read, tokens = hidden_states(6), torch.randint(0, 7, (6, 5), generator=generator)
    tokens = drafted_part(head, tokens)
    kept = (tokens[:, skip:] >= 0)[..., None]
    weights = torch.randn(6, 5 - skip, 4, generator=generator) * kept
    wanted = conditionals(head.circuit, head(read, tokens[:, 0]), tokens)
    found = mixture(head, read, tokens).log()
    torch.testing.assert_close(found * kept, wanted * kept, rtol=0, atol=1e-5)  # float32
    parameters = list(head.parameters())
    gradients = [torch.autograd.grad((part * weights).sum(), parameters) for part in (found, wanted)]
    for name, one, other in zip(dict(head.named_parameters()), *gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, msg=name)


def test_drafts_after_a_token_outside_the_vocabulary_have_no_loss():
    head = build("mlp", ids=[0, 2, 3, 5])
    tokens = torch.tensor([[1, 2, 4, 3, 0], [0, 0, 2, -1, -1], [1, 6, 0, 0, 0]])
    assert drafted_part(head, tokens).tolist() == [[1, 2, 4, -1, -1], [0, 0, 2, -1, -1], [1, 6, -1, -1, -1]]


def test_bf16_casts_only_the_products_of_the_head(monkeypatch):
    found, seen = {}, []
    monkeypatch.setattr(losses, "window_loss", lambda q, *more: seen.append(q) or window_loss(q, *more))
    for precision in ("float32", "bf16"):
        o = options("btree", precision=precision)
        names = {"circuit": "btree", "window": N, "num_components": R, "verifier": "../target"}
        torch.manual_seed(0)
        head = build_head(HeadConfig.create(**names, target={"model_type": "llama", "vocab_size": V, "hidden_size": 8}))
        with torch.no_grad():
            head.leaves.leaf_weight.normal_()
        hidden = torch.randn(B, 8, generator=torch.Generator().manual_seed(1))
        found[precision] = step_loss(head, hidden.__getitem__, TOKENS, COUNTS, lambda piece: None, o).item()
        assert seen[-1].dtype == torch.float32
        # probabilities sum to 1 as float32 has it, not as bfloat16 has it
        torch.testing.assert_close(seen[-1].sum(-1), torch.ones(B, N), atol=1e-5, rtol=0)
    assert found["bf16"] == pytest.approx(found["float32"], rel=0.02)  # 8 bits of mantissa in products of 8 terms
    assert found["bf16"] != found["float32"]
