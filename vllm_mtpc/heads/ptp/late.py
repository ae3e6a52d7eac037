"""The late network of a PTP head: what the rows of drafts compute behind the target's final norm, one after another.

An extension of the paper (arXiv 2512.21323), whose rows have the target's own layers and nothing else, all at once. A
row in the middle of a window then knows the tokens in front of it only if earlier rows have worked them out some layers
before the last; a target that decides in its last layers leaves no room for that. So that step is made here.
With h_k the state of the row that gives draft k, t_k the token in front of that draft (the verifier's, then the drafts
themselves; in training the text's) and E the target's own token embeddings,

    x_k = h_k / rms(h_k)                        e_k = E[t_k] / rms(E[t_k])                        s_0 = 0
    y_k = x_k + C gelu(A [x_k ; e_k ; s_(k-1)] + a) + c
    s_k = y_k / rms(y_k)                        rms(h_k) y_k goes to the target's own lm_head

No attention, no KV cache, nothing of the vocabulary's size. C and c start at zero, where the network changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EPSILON = 1e-6


class LateNetwork(nn.Module):
    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.state = nn.Linear(hidden_size, width)  # A and a, by what they read
        self.token = nn.Linear(hidden_size, width, bias=False)
        self.before = nn.Linear(hidden_size, width, bias=False)
        self.outer = nn.Linear(width, hidden_size)  # C, c
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)

    def step(self, hidden: Tensor, token: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        """(state for lm_head, s) [..., D] of one row: its state, that token's embedding, s of the row before.

        Computed in the dtype of the weights; the state for lm_head is in that of `hidden`.
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
        """States [..., m, D] for lm_head where the tokens in front are known: hidden and embeddings [..., m, D]."""
        states, before = [], None
        for row, token in zip(hidden.unbind(-2), tokens.unbind(-2), strict=True):
            state, before = self.step(row, token, before)
            states.append(state)
        return torch.stack(states, -2)

    def draft(
        self,
        hidden: Tensor,  # [R, K, D] of the rows that give drafts
        first: Tensor,  # [R] the token in front of the first draft
        embed: Callable[[Tensor], Tensor],  # the target's token embeddings
        choose: Callable[[Tensor, int], Tensor],  # (states [R, D] for lm_head, k) -> draft k [R]
    ) -> Tensor:
        """Drafts [R, K] int64, each in front of the next."""
        drafts, token, before = [], first, None
        for k in range(hidden.shape[1]):
            state, before = self.step(hidden[:, k], embed(token), before)
            token = choose(state, k)
            drafts.append(token)
        return torch.stack(drafts, 1)


def build_late(hidden_size: int, width: int | None) -> LateNetwork | None:
    """An untrained late network on the current default device and dtype; None without a width."""
    return LateNetwork(hidden_size, width) if width else None


def _rms(values: Tensor) -> Tensor:
    """[..., 1]"""
    return values.square().mean(-1, keepdim=True).add(EPSILON).sqrt()
