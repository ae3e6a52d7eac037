"""Losses of a window, from the circuit's exact conditionals and the target's distribution: docs/training.md#losses.

CE: MtPC paper, eq. 4 and section 4; KL: appendix G. Means are over windows with a token at k; positions without a token
are marginalised and have no loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vllm_mtpc.circuits.base import TINY
from vllm_mtpc.heads.head import Head
from vllm_mtpc.heads.trunk.lora import LoraDraftLayers
from vllm_mtpc.hf import Target
from vllm_mtpc.train.mixture import Divergences, mixture
from vllm_mtpc.train.options import TrainOptions
from vllm_mtpc.train.windows import Windows, window_states

CHUNK_BYTES = 1 << 30
COPIES = 4  # logits, log-softmax, its exponential and a gradient are in memory at the same time
NORM_ELEMENTS = 1 << 25  # of the target's logits that are in memory at the same time
WATCHED = 128  # windows of a step that the running estimate of tokens/step is measured on
Reader = Callable[[slice], Tensor]  # values of some of the windows


def window_loss(
    q: Tensor, tokens: Tensor, columns: Tensor, log_p: Tensor | None, options: TrainOptions, counts: Tensor
) -> Tensor:
    """Return this batch's share of L in nats, a scalar: terms summed over windows, divided by `counts`.

    Args:
        q: [B, n - s, V], the conditionals of the positions from s on, 0 or 1; V: number of columns.
        tokens: [B, n] int64, -1 where there is no token, and after the first that cannot be drafted (`drafted_part`).
        columns: [B, n - s] int64, of the tokens; -1: none, which has no likelihood.
        log_p: [B, n - s, V], log p_k of the target; None if the options do not need it.
        options: Weights and form of the loss.
        counts: [n], windows of the whole step with a token at k.
    """
    skip = tokens.shape[1] - q.shape[1]
    kept = tokens[:, skip:] >= 0
    of_positions = options.gamma ** torch.arange(tokens.shape[1], dtype=torch.float64)  # w_k, [n]
    of_positions[0] *= options.train_first
    of_positions = of_positions[skip:] / of_positions.sum()
    weights = of_positions.to(q) / counts[skip:].clamp(min=1).to(q)  # [n - s]
    likelihood = _at(q, columns).clamp(min=TINY).log().masked_fill(columns < 0, 0)
    terms, overlap = -(1 - options.beta) * likelihood, None
    if log_p is not None:
        overlap, divergence = Divergences.apply(q, log_p)
        terms = terms + options.beta * divergence
    loss = (1 - options.acceptance) * (terms.masked_fill(~kept, 0) * weights).sum()
    if options.acceptance == 0:
        return loss
    assert overlap is not None
    drafted = slice(1 - skip, None)
    variation, weights = (1 - overlap[:, drafted]).masked_fill(~kept[:, drafted], 0), weights[drafted]
    return loss + options.acceptance * (variation * weights).sum() / of_positions[drafted].sum()


def drafted_part(head: Head, tokens: Tensor) -> Tensor:
    """Return tokens [B, n] with -1 after the first drafted token, x_2 or later, that has no column.

    Drafts after it cannot be accepted. Its own position keeps the terms of the distributions.
    """
    if head.vocabulary is None:
        return tokens
    is_outside = (head.vocabulary.find(tokens) < 0) & (tokens >= 0)
    is_outside[:, 0] = False
    before = is_outside.cumsum(1) - is_outside.long()
    return tokens.masked_fill(before > 0, -1)


def _at(log_probs: Tensor, columns: Tensor) -> Tensor:
    return log_probs.gather(-1, columns.clamp(min=0).unsqueeze(-1))[..., 0]


def chunk_size(options: TrainOptions, head: Head) -> int:
    """Return the number of windows whose logits and backbone states are in memory at the same time."""
    if options.chunk_windows:
        return options.chunk_windows
    logits = head.circuit.window * head.circuit.num_components * head.columns * 4 * COPIES
    return max(1, CHUNK_BYTES // (logits + getattr(head.trunk, "window_bytes", 0)))


def step_loss(head: Head, read: Reader, tokens: Tensor, counts: Tensor, log_p: Reader, options: TrainOptions) -> Tensor:
    """Return L of the windows of a step, computed in chunks; several chunks are recomputed in the backward pass.

    `read` returns what the trunk reads for a slice of the windows, and `log_p` the target's log p_k, [., n - s,
    columns], if the options need it. tokens [B, n] and counts [n]: as of `window_loss`.
    """
    kept, skip = drafted_part(head, tokens), head.leaves.skip
    columns = kept[:, skip:] if head.vocabulary is None else head.vocabulary.find(kept[:, skip:])

    def chunk_loss(piece: slice) -> Tensor:
        target = log_p(piece) if options.needs_distribution else None
        # Only the head's products are cast: its logits and the circuit are float32.
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=options.precision == "bf16"):
            q = mixture(head, read(piece), kept[piece])
        return window_loss(q, kept[piece], columns[piece], target, options, counts)

    return in_chunks(chunk_loss, len(tokens), chunk_size(options, head))


def in_chunks(loss: Callable[[slice], Tensor], windows: int, size: int) -> Tensor:
    """Return the sum of a loss over chunks of `size` windows; several are computed again in the backward pass."""
    if windows <= size:
        return loss(slice(0, windows))
    pieces = [slice(first, min(first + size, windows)) for first in range(0, windows, size)]
    return sum(checkpoint(loss, piece, use_reentrant=False) for piece in pieces)


class CircuitModule(nn.Module):
    """The trained module: the head and its draft layers. The target is no submodule: it is not trained or sharded."""

    def __init__(
        self, head: Head, target: Target, options: TrainOptions, layers: LoraDraftLayers | None = None
    ) -> None:
        super().__init__()
        self.head, self.layers, self.options, self.target = head, layers, options, target
        self._norms: tuple[Any, Tensor] | None = None  # of the current block

    def forward(self, batch: Windows, watch: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return the loss in nats and, if watched, the sums of `watched_tokens`."""
        if not len(batch.row):  # no windows in this process; the others wait for its gradient
            return sum(value.sum() for value in self.parameters()) * 0.0, torch.zeros(2, device=self.target.device)
        read, tokens, counts, log_p = self.read(batch)
        loss = step_loss(self.head, read, tokens, counts, log_p, self.options)
        if not watch:
            return loss, None

        def watched_sums(piece: slice) -> Tensor:
            return watched_tokens(self.head, read(piece), tokens[piece], log_p(piece))

        with torch.no_grad():
            return loss, in_chunks(watched_sums, len(tokens[:WATCHED]), chunk_size(self.options, self.head))

    def read(self, batch: Windows) -> tuple[Reader, Tensor, Tensor, Reader]:
        """Return the reader of the trunk's input, tokens [B, n], counts [n], and the reader of log p_k."""
        device, window, head = self.target.device, self.head.circuit.window, self.head
        if head.trunk.is_per_position:  # sort by row: chunks then have few rows
            order = (batch.row * batch.hidden.shape[1] + batch.start).argsort()
            batch = batch.each(lambda value: value[order])
        tokens, counts, row, start = (part.to(device) for part in (batch.tokens, batch.counts, batch.row, batch.start))
        hidden, document = batch.hidden.to(device), batch.document.to(device)
        verified = drafted = hidden
        if self.layers is not None:  # `hidden` is the input of the draft layers
            drafted, verified = self.layers.draft(hidden, document), self.layers.plain(hidden, document)
        with torch.autocast(device.type, torch.bfloat16, enabled=self.options.precision == "bf16"):
            windows = head.trunk.windows(drafted, document, row, start, tokens[:, 0])
        verified, skip = verified[..., -self.target.hidden_size :], head.leaves.skip
        norms = self._normalisers(batch.hidden, verified, document)

        def read(some: slice) -> Tensor:
            return windows(some).to(head.hidden_dtype)

        def log_p(piece: slice) -> Tensor:
            with torch.no_grad(), torch.autocast(device.type, enabled=False):
                states = window_states(verified, row[piece], start[piece], window)[:, skip:]
                if norms is None:
                    return self.target.logits(states).log_softmax(-1)
                own = window_states(norms, row[piece], start[piece], window)[:, skip:]
                return self._logits(states) - own

        return read, tokens, counts, log_p

    @torch.no_grad()
    def _normalisers(self, block: Any, states: Tensor, document: Tensor) -> Tensor | None:
        """Return the log-sums [R, S, 1] of the target's logits over all ids, once per block; None: of all columns."""
        if self.head.vocabulary is None or not self.options.needs_distribution:
            return None
        if self._norms is None or self._norms[0] is not block:
            self._logits, places = self.target.logits_for(self.head.vocabulary.ids), (document >= 0).nonzero()
            norms = states.new_zeros(*document.shape, 1, dtype=torch.float32)
            for some in places.split(max(1, NORM_ELEMENTS // self.target.vocab_size)):
                row, at = some.unbind(1)
                norms[row, at] = self.target.logits(states[row, at]).logsumexp(-1, keepdim=True)
            self._norms = block, norms
        return self._norms[1]


def watched_tokens(head: Head, read: Tensor, tokens: Tensor, log_p: Tensor) -> Tensor:
    """Return sums [2] over windows: expected tokens at T=1 of a step that starts there, and windows.

    `read`: what the trunk reads for windows of text, tokens [B, n]; log_p [B, n - s, columns]: the target's log p_k.
    """
    skip, kept = head.leaves.skip, drafted_part(head, tokens)
    columns = kept[:, skip:] if head.vocabulary is None else head.vocabulary.find(kept[:, skip:])
    log_q = _at(mixture(head, read, kept), columns).clamp(min=TINY).log()
    ratio = (log_q - _at(log_p, columns))[:, 1 - skip :].clamp(max=0).exp()
    alive = ratio.masked_fill(columns[:, 1 - skip :] < 0, 0).cumprod(1)  # [B, n - 1], P(drafts 2 .. k are accepted)
    windows = (tokens[:, 0] >= 0).sum()
    return torch.stack([alive.sum() + windows, windows.to(alive.dtype)])
