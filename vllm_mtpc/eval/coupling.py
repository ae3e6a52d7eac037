"""A PTP head's part of a decoding loop: drafts and target pick their tokens by the same u.

Every token is x_k = Pick(u_k, Q_k), Q_k the target's processed distribution and u_k a hash of (seed, k - 1); greedy:
the argmax, and 0.5 on every row. So the text is a function of prompt and seed, whatever is drafted. A step is two
passes: x_1 is read, its row gives x_2, the student the drafts behind (pass 1; here x_1 and the rows of u are two calls,
which read one cache), then the target reads the drafts (pass 2); they are accepted while they are what it picks, and
what it picks behind them is the next x_1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_mtpc.eval.ptp_acceptance import draft, draft_rows
from vllm_mtpc.heads.ptp.student import UNINFORMED, Prefix
from vllm_mtpc.kernels.pick import pick
from vllm_mtpc.kernels.uniform import uniform

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_mtpc.eval.sampling import Sampling
    from vllm_mtpc.heads.ptp.student import Student
    from vllm_mtpc.hf.session import Session


class Picker:
    """The target's choice of tokens by u, of one request."""

    def __init__(self, sampling: Sampling, seed: int, device: torch.device) -> None:
        self.sampling, self.seed, self.device = sampling, seed, device

    def u(self, first: int, count: int) -> Tensor:
        """u of the tokens at first .. first + count - 1, float32[count]."""
        if self.sampling.greedy:
            return torch.full((count,), UNINFORMED, device=self.device)
        at = torch.arange(first, first + count, device=self.device)
        return uniform(torch.full_like(at, self.seed), at - 1)

    def pick(self, log_q: Tensor, first: int) -> Tensor:
        """Tokens [m] at first, first + 1, .. by log_q[m, V], of ``sampling``."""
        return log_q.argmax(-1) if self.sampling.greedy else pick(log_q, self.u(first, len(log_q)))


class Coupling:
    """``decode.Drafting`` of a PTP head. The first text has ``seed``, every further one the next."""

    def __init__(self, student: Student, sampling: Sampling, seed: int = 0, num_drafts: int | None = None) -> None:
        self.student, self.sampling, self.seed = student, sampling, seed
        self.num_drafts = student.config.num_speculative_tokens if num_drafts is None else num_drafts

    def start(self, reader: Session, hidden: Tensor, length: int) -> Tensor:
        self.session, self.length = reader, length  # tokens that are read
        self.picker = Picker(self.sampling, self.seed, self.student.target.device)
        self.seed += 1
        return self._picked(hidden)

    def step(self, mode: str, hidden: Tensor, first: Tensor) -> tuple[Tensor, int, Tensor, Tensor]:
        states = self.session.read(first[None])[0]  # [1, D]: x_1 at index `length` is read
        self.length += 1
        drafts = first.new_empty(0)
        if mode != "stp":
            drafts = self.draft(states)
            states = torch.cat([states, self.session.read(drafts[None])[0]])  # [1 + K, D]
        picked = self._picked(states)  # [1 + K]
        kept = int((picked[:-1] == drafts).long().cumprod(0).sum()) if mode == "speculative" else len(drafts)
        self.length += kept
        return drafts, kept, picked[kept : kept + 1], states

    def draft(self, state: Tensor) -> Tensor:
        """Drafts [K] behind the tokens that are read, the last of them with state[1, D]."""
        sure = self._picked(state)
        if self.num_drafts == 1:
            return sure
        rows = draft_rows(self.student, self.num_drafts - 1)
        u = self.picker.u(self.length, self.num_drafts)  # of the drafts
        zero = torch.zeros(1, dtype=torch.long, device=state.device)
        hidden = self.student.aux(self._prefix(), zero, zero + self.length - 1, u[None, : rows.stop])[:, rows]
        return torch.cat([sure, draft(self.student, hidden, u[None, 1:], self.sampling.greedy, sure)[0]])

    def _picked(self, states: Tensor) -> Tensor:
        """What the target picks behind states[m, D], the first of which belongs to the last token that is read."""
        return self.picker.pick(self.sampling.log_probs(self.student.logits(states)), self.length)

    def _prefix(self) -> Prefix:
        """What is in the cache, as the student's windows read it."""
        layers = self.session.cache.layers
        at = torch.arange(self.length, device=self.picker.device)[None]
        keys, values = [layer.keys for layer in layers], [layer.values for layer in layers]
        return Prefix(keys[0].new_empty(1, self.length, 0), keys, values, at, torch.zeros_like(at))
