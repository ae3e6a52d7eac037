"""A circuit's part of a decoding loop: drafts token by token, standard rejection sampling (Leviathan et al., 2023).

A forward of the target reads x_1 and its K drafts; drafts are accepted while u < p/q; the token that ends a step,
recovered from max(p - q, 0) or drawn behind the last draft, is the next x_1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_mtpc.eval.acceptance import circuit_params, num_positions

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vllm_mtpc.eval.sampling import Sampling
    from vllm_mtpc.hf.session import Reader


class Rejection:
    """``decode.Drafting`` of a circuit; the noise of all texts comes from one generator. ``head`` None: mode stp."""

    def __init__(
        self,
        head: nn.Module | None,
        sampling: Sampling,
        generator: torch.Generator | None = None,
        num_drafts: int | None = None,
    ) -> None:
        self.head, self.sampling, self.generator = head, sampling, generator
        self.num_drafts = 0 if head is None else num_positions(head, num_drafts) - 1

    def start(self, reader: Reader, hidden: Tensor, length: int) -> Tensor:
        self.reader = reader
        return self.sampling.pick(self.sampling.log_probs(reader.logits(hidden)), self.generator)

    def step(self, mode: str, hidden: Tensor, first: Tensor) -> tuple[Tensor, int, Tensor, Tensor]:
        if mode == "stp":
            drafts, log_q = first.new_empty(1, 0), None
        else:
            drafts, log_q = draft(self.head, hidden, first, self.num_drafts, self.sampling, self.generator)
        states = self.reader.read(torch.cat([first[:, None], drafts], 1))  # [1, 1 + K, D]
        log_p = self.sampling.log_probs(self.reader.logits(states))
        if mode == "speculative":
            count, first = verify(log_p, log_q, drafts, self.sampling, self.generator)
            return drafts[0], int(count), first, states[0]
        return drafts[0], drafts.shape[1], self.sampling.pick(log_p[:, -1], self.generator), states[0]


def verify(
    log_p: Tensor, log_q: Tensor, drafts: Tensor, sampling: Sampling, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Rejection sampling of drafts[B, K]; log_p: [B, K + 1, V] of the target, log_q: [B, K, V] they were drawn from.

    Returns how many drafts are accepted [B], and the token behind them [B]: recovered, or the bonus after K drafts.
    """
    if sampling.greedy:
        choice = log_p.argmax(-1)  # [B, K + 1]
        accepted = (choice[:, :-1] == drafts).long().cumprod(-1).sum(-1)
        return accepted, choice.gather(1, accepted[:, None])[:, 0]
    chosen = drafts[..., None]
    keep = (log_p[:, :-1].gather(-1, chosen) - log_q.gather(-1, chosen))[..., 0].exp()  # [B, K]
    uniform = torch.rand(keep.shape, generator=generator, device=keep.device)
    accepted = (uniform < keep).long().cumprod(-1).sum(-1)
    # Behind the last draft nothing was proposed: q = 0, and the "recovered" token is a draw from p.
    q = torch.cat([log_q.exp(), torch.zeros_like(log_p[:, :1])], 1)
    at = accepted[:, None, None].expand(-1, 1, log_p.shape[-1])
    left = (log_p.exp().gather(1, at) - q.gather(1, at))[:, 0].clamp(min=0)  # [B, V]
    # p = q up to rounding leaves nothing; the rejection was then rounding as well, and p itself is the distribution.
    left = torch.where(left.sum(-1, keepdim=True) > 0, left, log_p.exp().gather(1, at)[:, 0])
    return accepted, torch.multinomial(left, 1, generator=generator)[:, 0]


def draft(
    head: nn.Module,
    hidden: Tensor,
    first: Tensor,
    num_drafts: int,
    sampling: Sampling,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Drafts [B, K] behind first[B] = x_1 at hidden[B, D], and log [B, K, V] of what they were drawn from."""
    params, circuit = circuit_params(head, hidden, num_drafts + 1), head.circuit
    state, token = circuit.start(params), first
    log_q, tokens = [], []
    for k in range(1, num_drafts + 1):
        state = circuit.observe(params, state, k - 1, token)
        log_q.append(sampling.draft_log_probs(circuit.next_log_probs(params, state, k)))
        token = sampling.pick(log_q[-1], generator)
        tokens.append(token)
    return torch.stack(tokens, 1), torch.stack(log_q, 1)
