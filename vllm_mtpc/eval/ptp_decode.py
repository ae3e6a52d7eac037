"""Decoding loops of a PTP head on a target with a key-value cache: plain, unverified, and as a two-pass server does it.

Every token is x_k = Pick(u_k, Q_k), Q_k the target's processed law and u_k a hash of (seed, k - 1); greedy: the argmax,
and 0.5 on every row. So the text is a function of prompt and seed, whatever is drafted.

- ``stp``: one token per forward of the target.
- ``mtp``: x_1 is read, its row gives x_2, the student the drafts behind; all are kept, nothing is verified.
- ``speculative``: x_1 is read and x_2..x_(1+K) are drafted in the same way (pass 1; here x_1 and the rows of u are two
  calls, which read one cache), the target reads the drafts (pass 2); they are kept while they are what it picks, and
  what it picks behind them is the next x_1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from vllm_mtpc.errors import UsageError
from vllm_mtpc.eval.acceptance import check_drafts
from vllm_mtpc.eval.decode import MODES, Decoded
from vllm_mtpc.eval.ptp import draft, draft_rows
from vllm_mtpc.heads.ptp.student import UNINFORMED, Prefix
from vllm_mtpc.hf.session import Session
from vllm_mtpc.kernels.pick import pick
from vllm_mtpc.kernels.uniform import uniform

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_mtpc.eval.sampling import Sampling
    from vllm_mtpc.heads.ptp.student import Student


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

    def pick(self, logits: Tensor, first: int) -> Tensor:
        """Tokens [m] at first, first + 1, .. by logits[m, V]."""
        log_q = self.sampling.log_probs(logits)
        return log_q.argmax(-1) if self.sampling.greedy else pick(log_q, self.u(first, len(log_q)))


@torch.inference_mode()
def continue_prompt(
    mode: str,
    student: Student,
    prompt: Tensor,
    new_tokens: int,
    sampling: Sampling,
    seed: int = 0,
    num_drafts: int | None = None,
    stops: set[int] = frozenset(),
    show: Callable[[Sequence[int]], object] | None = None,
    corrupt: Callable[[Tensor], Tensor] | None = None,
) -> Decoded:
    """Continues prompt[P] by up to ``new_tokens`` tokens; a stop token ends the text.

    ``show`` is given the tokens as they come; ``corrupt`` may replace the drafts [K] before they are verified.
    """
    if mode not in MODES:
        raise UsageError(f"mode {mode!r}: allowed are {', '.join(MODES)}")
    text = _Text(student, sampling, seed, new_tokens, stops, show)
    config = student.config
    drafts = config.num_speculative_tokens if num_drafts is None else check_drafts(config.window, num_drafts)
    text.done.num_drafts = 0 if mode == "stp" else drafts
    started = time.perf_counter()
    states = text.session.start([prompt])[0, -1:]  # [1, D]
    text.done.prompt_seconds, started = time.perf_counter() - started, time.perf_counter()
    length = len(prompt)  # tokens read
    first = text.picker.pick(text.logits(states), length)
    goes_on = text.emit(first, states)
    while goes_on:
        state = text.session.read(first[None])[0]  # [1, D]: x_1 at index `length` is read
        length += 1
        if mode == "stp":
            text.done.accepted.append(0)
            first = text.picker.pick(text.logits(state), length)
            goes_on = text.emit(first, state)
            continue
        drafted = text.draft(state, length, drafts)  # [K]: tokens length .. length + K - 1
        drafted = drafted if corrupt is None else corrupt(drafted)
        states = torch.cat([state, text.session.read(drafted[None])[0]])  # [1 + K, D]
        picked = text.picker.pick(text.logits(states), length)  # [K + 1]
        kept = drafts if mode == "mtp" else int((picked[:-1] == drafted).long().cumprod(0).sum())
        text.session.crop(drafts - kept)
        text.done.accepted.append(kept)
        first, length = picked[kept : kept + 1], length + kept
        goes_on = text.emit(torch.cat([drafted[:kept], first]), states)
    text.done.seconds = time.perf_counter() - started
    return text.done


class _Text:
    """One continuation while it is written."""

    def __init__(
        self,
        student: Student,
        sampling: Sampling,
        seed: int,
        new_tokens: int,
        stops: set[int],
        show: Callable[[Sequence[int]], object] | None,
    ) -> None:
        self.student, self.new_tokens, self.stops, self.show = student, new_tokens, stops, show
        self.session = Session(student.target)
        self.picker = Picker(sampling, seed, student.target.device)
        self.done = Decoded()

    def logits(self, states: Tensor) -> Tensor:
        return self.student.logits(states)

    def draft(self, state: Tensor, length: int, count: int) -> Tensor:
        """Drafts [K] behind ``length`` tokens that are read, the last of them with state[1, D]."""
        sure = self.picker.pick(self.logits(state), length)
        if count == 1:
            return sure
        rows = draft_rows(self.student, count - 1)
        u = self.picker.u(length, count)  # of the drafts
        zero = torch.zeros(1, dtype=torch.long, device=state.device)
        hidden = self.student.aux(self._prefix(length), zero, zero + length - 1, u[None, : rows.stop])[:, rows]
        return torch.cat([sure, draft(self.student, hidden, u[None, 1:], self.picker.sampling.greedy, sure)[0]])

    def _prefix(self, length: int) -> Prefix:
        """What is in the cache, as the student's windows read it."""
        layers = self.session.cache.layers
        at = torch.arange(length, device=self.picker.device)[None]
        keys, values = [layer.keys for layer in layers], [layer.values for layer in layers]
        return Prefix(keys[0].new_empty(1, length, 0), keys, values, at, torch.zeros_like(at))

    def emit(self, tokens: Tensor, states: Tensor) -> bool:
        """Adds tokens whose predicting states are states[:len(tokens), D]; whether the text goes on."""
        found = tokens.tolist()
        stop = next((at + 1 for at, token in enumerate(found) if token in self.stops), len(found))
        kept = found[: min(self.new_tokens - len(self.done.tokens), stop)]
        log_p = self.logits(states[: len(kept)]).log_softmax(-1)
        self.done.nats += (-log_p[range(len(kept)), kept]).tolist()
        self.done.tokens += kept
        if self.show:
            self.show(kept)
        return len(self.done.tokens) < self.new_tokens and not any(token in self.stops for token in kept)
