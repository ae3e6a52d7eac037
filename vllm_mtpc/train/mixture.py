"""The conditionals of a circuit for training: `circuits.conditionals` with few passes over the leaves, which are large.

    P_z = softmax(leaf_z)      e = exp(bias of the token before), 1 without a bigram      n_z = P_z . e
    q = e sum_z (w_z / n_z) P_z,      w: the circuit's weights, a function of the evidence log P_z(x) e(x) / n_z

The backward keeps P alone: with a(v) = (w_z / n_z) g(v) e(v) + h_z e(v), g the gradient of q and h that of n,

    gradient of leaf_z = P_z (a - P_z . a - d_z) + d_z at x,      d: that of the evidence
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_mtpc.circuits.base import TINY, Circuit
from vllm_mtpc.heads.head import Head
from vllm_mtpc.kernels.filter import filter_weights

Weigh = Callable[[Tensor, Tensor, Tensor], Tensor]  # evidence [B, k, r], root, inner -> log weights [B, k, r]


class Mixture(torch.autograd.Function):
    """(leaf [B, k, r, V], root, inner, factors [B, k, V] or None, columns [B, k], Weigh) -> q [B, k, V]."""

    @staticmethod
    def forward(
        ctx: Any, leaf: Tensor, root: Tensor, inner: Tensor, factors: Tensor | None, columns: Tensor, weigh: Weigh
    ) -> Tensor:
        probs = leaf.softmax(-1)
        index = columns.clamp(min=0)[:, :, None, None].expand(-1, -1, leaf.shape[2], 1)
        evidence = probs.gather(3, index)[..., 0].clamp(min=TINY).log()
        norms = torch.zeros_like(evidence)
        if factors is not None:
            norms = (probs @ factors.unsqueeze(-1))[..., 0].clamp(min=TINY).log()
            evidence = evidence + factors.gather(2, index[:, :, 0]).clamp(min=TINY).log() - norms
        with torch.enable_grad():  # the small part: its own graph
            small = [value.detach().requires_grad_() for value in (evidence, root, inner, norms)]
            kept = small[0].masked_fill((columns < 0)[..., None], 0.0)
            weights = (weigh(kept, small[1], small[2]) - small[3]).exp()
        q = (weights.detach().unsqueeze(2) @ probs)[:, :, 0]
        ctx.small, ctx.weights, ctx.index, ctx.has_factors = small, weights, index, factors is not None
        ctx.save_for_backward(probs, q, *(() if factors is None else (factors,)))
        return q if factors is None else q * factors

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        probs, q, *more = ctx.saved_tensors
        factors = more[0] if more else None
        own = grad if factors is None else grad * factors
        of_weights = (probs @ own.unsqueeze(-1))[..., 0]  # [B, k, r]
        of_evidence, *of_sums, of_norms = torch.autograd.grad(
            ctx.weights, ctx.small, of_weights, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        weights = ctx.weights.detach()
        constant = weights * of_weights + of_evidence
        rows, columns, of_factors = weights.unsqueeze(-1), own.unsqueeze(2), None
        if factors is not None:
            of_norms = of_norms - of_evidence  # log-normalisers
            per_norm = of_norms / ctx.small[3].detach().exp()
            constant = constant + of_norms
            rows, columns = torch.stack([weights, per_norm], -1), torch.stack([own, factors], 2)
            of_factors = grad * q + (per_norm.unsqueeze(2) @ probs)[:, :, 0]
            at = ctx.index[:, :, 0]
            of_factors.scatter_add_(2, at, of_evidence.sum(-1, keepdim=True) / factors.gather(2, at).clamp(min=TINY))
        change = torch.baddbmm(
            -constant.flatten(0, 1).unsqueeze(-1), rows.flatten(0, 1), columns.flatten(0, 1)
        ).view_as(probs)
        leaf = change.mul_(probs).scatter_add_(3, ctx.index, of_evidence.unsqueeze(-1))
        return leaf, *of_sums, of_factors, None, None


class Divergences(torch.autograd.Function):
    """(q [..., V], log p [..., V]) -> sum_v min(p, q) and sum_v p log(p / q), [...] each."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
        p = log_p.exp()
        ctx.save_for_backward(q, p)
        divergence = torch.linalg.vecdot(p, log_p - q.clamp(min=TINY).log_())
        return torch.minimum(p, q).sum(-1), divergence

    @staticmethod
    def backward(ctx: Any, of_overlap: Tensor, of_divergence: Tensor) -> tuple[Tensor, None]:
        q, p = ctx.saved_tensors
        grad = (p / q.clamp(min=TINY)).mul_(-of_divergence.unsqueeze(-1))
        return grad.add_((q < p) * of_overlap.unsqueeze(-1)), None


def mixture(head: Head, read: Tensor, tokens: Tensor) -> Tensor:
    """Return q(x_k = . | x_1 .. x_(k-1), h) [B, n - skip, columns] along tokens [B, n], -1 where there is none.

    `read`: what the head's trunk reads for the windows.
    """
    circuit, leaves, skip = head.circuit, head.leaves, head.leaves.skip
    state, states = head.trunk(read, tokens[:, 0].clamp(min=0))
    leaf = leaves(states, skip, circuit.window).float()
    root, inner = head.sum_logits(state)
    columns = tokens if head.vocabulary is None else head.vocabulary.find(tokens)
    factors, bigram = None, leaves.bigram()
    if bigram is not None:
        biases = bigram.biases(tokens[:, :-1])
        factors = (biases - biases.detach().amax(-1, keepdim=True)).exp()
        factors = factors if skip else F.pad(factors, (0, 0, 1, 0), value=1.0)
    with torch.autocast(leaf.device.type, enabled=False):  # the circuit is computed in float32
        return Mixture.apply(leaf, root, inner, factors, columns[:, skip:], weigher(circuit, skip))


def weigher(circuit: Circuit, skip: int) -> Weigh:
    """Return the function of the weights of a circuit whose first `skip` positions have no leaf."""

    def weigh(evidence: Tensor, root: Tensor, inner: Tensor) -> Tensor:
        evidence = F.pad(evidence, (0, 0, skip, 0))
        return filter_weights(circuit.program, evidence, root, inner)[:, skip:]

    return weigh
