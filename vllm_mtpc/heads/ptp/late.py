"""The late network of a PTP head: computed for the rows of drafts after the target's final norm, one after another.

An extension of the paper (arXiv 2512.21323), whose rows run through the target's layers only, all at once: the late
network is conditioned on the drafts before. With h_k the state of the row of draft k, t_k the token before that draft
(x_1, then the drafts; in training the text's) and E the target's own token embeddings,

    x_k = h_k / rms(h_k)                        e_k = E[t_k] / rms(E[t_k])                        s_0 = 0
    y_k = x_k + C gelu(A [x_k ; e_k ; s_(k-1)] + a) + c
    s_k = y_k / rms(y_k)                        rms(h_k) y_k goes to the target's own lm_head

C and c start at zero, where the network changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EPSILON = 1e-6


class LateNetwork(nn.Module):
    """The network above, on states of `hidden_size` D, with a hidden layer of `width`."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.state = nn.Linear(hidden_size, width)  # A and a, in one part per input
        self.token = nn.Linear(hidden_size, width, bias=False)
        self.before = nn.Linear(hidden_size, width, bias=False)
        self.outer = nn.Linear(width, hidden_size)  # C, c
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)

    def step(self, hidden: Tensor, token: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute one row, in the dtype of the weights.

        Args:
            hidden: [..., D], h_k.
            token: [..., D], E[t_k].
            before: [..., D], s_(k-1); None: 0.

        Returns:
            The state for lm_head [..., D] in the dtype of `hidden`, and s_k [..., D].
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

        Args:
            hidden: [R, K, D] of the rows of the drafts.
            first: [R], x_1.
            embed: the target's token embeddings.
            choose: (states for lm_head [R, D], k) -> draft k [R].
        """
        drafts, token, before = [], first, None
        for k in range(hidden.shape[1]):
            state, before = self.step(hidden[:, k], embed(token), before)
            token = choose(state, k)
            drafts.append(token)
        return torch.stack(drafts, 1)


def _rms(values: Tensor) -> Tensor:
    return values.square().mean(-1, keepdim=True).add(EPSILON).sqrt()
