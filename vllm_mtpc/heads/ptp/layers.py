"""The weights of a PTP head: the embedding of u in [0, 1), which rows carry in place of a token's, and a late network.

    e_i = 1{u <= i / n}, i = 1 .. n, then a linear layer

"Threshold" of the PTP paper (arXiv 2512.21323, appendix C.1); none of its others was better (benchmarks/PAPERS.md). u
is used in float32 for weights of any dtype: in half precision two values on either side of an edge are equal.

The late network is computed for the rows of drafts after the target's final norm, one after another. It extends the
paper, whose rows run through the target's layers only, all at once: the late network is conditioned on the drafts
before. With h_k the state of the row of draft k, t_k the token before that draft (x_1, then the drafts; in training the
text's) and E the target's own token embeddings,

    x_k = h_k / rms(h_k)                        e_k = E[t_k] / rms(E[t_k])                        s_0 = 0
    y_k = x_k + C gelu(A [x_k ; e_k ; s_(k-1)] + a) + c
    s_k = y_k / rms(y_k)                        rms(h_k) y_k goes to the target's own lm_head

C and c start at zero, where the network changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EPSILON = 1e-6


class LateNetwork(nn.Module):
    """The late network above, on states of `hidden_size` D, with a hidden layer of `width`."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.state = nn.Linear(hidden_size, width)  # A and a, in one part per input
        self.token = nn.Linear(hidden_size, width, bias=False)
        self.before = nn.Linear(hidden_size, width, bias=False)
        self.outer = nn.Linear(width, hidden_size)  # C, c
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)

    def step(self, hidden: Tensor, token: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return a row's state for lm_head in the dtype of `hidden`, and s_k in that of the weights; all are [..., D].

        hidden: h_k; token: E[t_k]; before: s_(k-1), None: 0.
        """
        with torch.autocast(hidden.device.type, enabled=False):
            values, embedded = hidden.to(self.outer.weight.dtype), token.to(self.outer.weight.dtype)
            size = _rms(values)
            values = values / size
            inner = self.state(values) + self.token(embedded / _rms(embedded))
            if before is not None:
                inner = inner + self.before(before)
            values = values + self.outer(F.gelu(inner))
            return (size * values).to(hidden.dtype), values / _rms(values)

    def forward(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Return the states for lm_head [..., m, D] of hidden [..., m, D] after embeddings `tokens` [..., m, D]."""
        states, before = [], None
        for row, token in zip(hidden.unbind(-2), tokens.unbind(-2), strict=True):
            state, before = self.step(row, token, before)
            states.append(state)
        return torch.stack(states, -2)

    def draft(
        self, hidden: Tensor, first: Tensor, embed: Callable[[Tensor], Tensor], choose: Callable[[Tensor, int], Tensor]
    ) -> Tensor:
        """Draft K tokens [R, K] int64, each conditioned on the one before it.

        hidden: [R, K, D] of the rows of the drafts; first: [R], x_1; embed: the target's token embeddings; choose:
        (states for lm_head [R, D], k) -> draft k [R].
        """
        drafts, token, before = [], first, None
        for k in range(hidden.shape[1]):
            state, before = self.step(hidden[:, k], embed(token), before)
            token = choose(state, k)
            drafts.append(token)
        return torch.stack(drafts, 1)


def _rms(values: Tensor) -> Tensor:
    return values.square().mean(-1, keepdim=True).add(EPSILON).sqrt()


class PtpLayers(nn.Module):
    """The embedding of u, which `forward` computes, and the network `late` of variant late, else None; untrained."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.outer = nn.Linear(config.u_features, config.hidden_size)
        self.late = LateNetwork(config.hidden_size, config.late_width) if config.late_width else None

    def forward(self, u: Tensor) -> Tensor:
        """Return the embeddings, [..., D] in the dtype of the weights, of u [...]."""
        count, weight = self.outer.in_features, self.outer.weight
        with torch.autocast(u.device.type, enabled=False):
            ends = torch.arange(1, count + 1, device=u.device).float() / count
            features = (u.float()[..., None] <= ends).float()  # [..., n]
            return F.linear(features, weight.float(), self.outer.bias.float()).to(weight.dtype)


class PtpHead(NamedTuple):
    """A PTP head as it is on disk; `checkpoint.load_student` puts it on its target."""

    config: Any  # PtpConfig
    lora: dict[str, Tensor]  # by PEFT's names ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight")
    layers: PtpLayers
