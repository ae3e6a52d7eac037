"""Inhomogeneous hidden Markov model: one latent per token, inner[k] = log p(z_{k+1} | z_k) (MtPC paper, section 3)."""

from __future__ import annotations

from torch import Tensor

from vllm_mtpc.circuits.base import Circuit, CircuitParams, FilterState, Reduce, step


class HMM(Circuit):
    name = "hmm"

    @property
    def num_inner(self) -> int:
        return self.window - 1  # in position order

    def advance(self, params: CircuitParams, state: FilterState, k: int, evidence: Tensor) -> FilterState:
        posterior = (state.weights + evidence).log_softmax(dim=-1)
        return FilterState(step(posterior, params.inner[:, k]))

    def joint(self, params: CircuitParams, evidence: Tensor, reduce: Reduce) -> Tensor:
        message = evidence[:, -1]
        for k in reversed(range(self.window - 1)):
            message = evidence[:, k] + reduce(params.inner[:, k] + message.unsqueeze(1), -1)
        return reduce(params.root + message, -1)
