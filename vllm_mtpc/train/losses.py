"""Losses of a window, from the circuit's exact conditionals and the target's distribution: docs/training.md#losses.

CE: MtPC paper, eq. 4 and section 4; KL: appendix G. Means are over windows with a token at k; positions without a token
are marginalised and have no loss.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vllm_mtpc.circuits import Circuit, CircuitParams
from vllm_mtpc.circuits.conditionals import conditionals
from vllm_mtpc.heads.adapters import LoraDraftLayers
from vllm_mtpc.heads.backbone import BackboneHead
from vllm_mtpc.heads.base import Head
from vllm_mtpc.heads.hosted import HostedHead
from vllm_mtpc.hf import Target
from vllm_mtpc.hf.attention import document_positions
from vllm_mtpc.train.options import TrainOptions
from vllm_mtpc.train.windows import Windows, window_states

CHUNK_BYTES = 1 << 30
COPIES = 4  # logits, log-softmax, its exponential and a gradient are in memory at the same time
WATCHED = 128  # windows of a step that the running estimate of tokens/step is measured on
Reader = Callable[[slice], Tensor]  # values of some of the windows


def window_loss(
    circuit: Circuit, params: CircuitParams, tokens: Tensor, log_p: Tensor | None, options: TrainOptions, counts: Tensor
) -> Tensor:
    """Return this batch's share of L in nats, a scalar: terms summed over windows, divided by `counts`.

    Args:
        circuit: The circuit over n tokens.
        params: Its parameters for B windows.
        tokens: [B, n] int64, -1 where there is no token.
        log_p: [B, n, V], log p_k of the target; None if the options do not need it.
        options: Weights and form of the loss.
        counts: [n], windows of the whole step with a token at k.
    """
    kept = tokens >= 0
    log_q = None if log_p is None else conditionals(circuit, params, tokens)  # [B, n, V]
    chosen = circuit.conditional_log_probs(params, tokens) if log_q is None else _at(log_q, tokens)  # [B, n]
    of_positions = options.gamma ** torch.arange(tokens.shape[1], dtype=torch.float64)  # w_k, [n], with sum 1
    of_positions[0] *= options.train_first
    of_positions /= of_positions.sum()
    means = 1 / counts.clamp(min=1).to(chosen)  # [n]
    weights = of_positions.to(chosen) * means
    terms = -(1 - options.beta) * chosen
    if options.beta > 0:
        assert log_p is not None
        terms = terms + options.beta * (log_p.exp() * (log_p - log_q)).sum(-1)
    loss = (1 - options.acceptance) * (terms.masked_fill(~kept, 0) * weights).sum()
    if options.acceptance == 0:
        return loss
    overlap = torch.minimum(log_q, log_p).exp().sum(-1)
    drafted = weights[1:] / of_positions[1:].sum()
    variation = (1 - overlap[:, 1:]).masked_fill(~kept[:, 1:], 0)
    return loss + options.acceptance * (variation * drafted).sum()


def _at(log_probs: Tensor, tokens: Tensor) -> Tensor:
    return log_probs.gather(-1, tokens.clamp(min=0).unsqueeze(-1))[..., 0]


def chunk_size(options: TrainOptions, head: Head) -> int:
    """Return the number of windows whose logits and backbone states are in memory at the same time."""
    if options.chunk_windows:
        return options.chunk_windows
    logits = options.window * options.num_components * head.vocab_size * 4 * COPIES
    return max(1, CHUNK_BYTES // (logits + (head.window_bytes if isinstance(head, BackboneHead) else 0)))


def step_loss(head: Head, read: Reader, tokens: Tensor, counts: Tensor, log_p: Reader, options: TrainOptions) -> Tensor:
    """Return L of the windows of a step, computed in chunks; several chunks are recomputed in the backward pass.

    Args:
        head: The head.
        read: Returns the input of the head for a slice of the windows, [., D] or as the head defines it.
        tokens: [B, n] int64, -1 where there is no token.
        counts: [n], windows of the whole step with a token at k.
        log_p: Returns the target's log p_k, [., n, V], for a slice; called only if the options need it.
        options: Loss, precision and size of the chunks.
    """

    def chunk_loss(piece: slice) -> Tensor:
        target = log_p(piece) if options.needs_distribution else None
        # Only the head's products are cast: its logits and the circuit are float32.
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=options.precision == "bf16"):
            params = head(read(piece))
        return window_loss(head.circuit, params, tokens[piece], target, options, counts)

    return in_chunks(chunk_loss, len(tokens), chunk_size(options, head))


def in_chunks(loss: Callable[[slice], Tensor], windows: int, size: int) -> Tensor:
    """Return the sum of a loss over chunks of `size` windows; several are computed again in the backward pass."""
    if windows <= size:
        return loss(slice(0, windows))
    pieces = [slice(first, min(first + size, windows)) for first in range(0, windows, size)]
    return sum(checkpoint(loss, piece, use_reentrant=False) for piece in pieces)


def zero_loss(model: nn.Module) -> Tensor:
    """Return a loss whose gradient is zero, of a process without windows: the others wait for its gradient."""
    return sum(value.sum() for value in model.parameters()) * 0.0


class CircuitModule(nn.Module):
    """The trained module: the head and its draft layers. The target is no submodule: it is not trained or sharded."""

    def __init__(
        self, head: Head, target: Target, options: TrainOptions, layers: LoraDraftLayers | None = None
    ) -> None:
        super().__init__()
        self.head, self.layers, self.options, self.target = head, layers, options, target

    def forward(self, batch: Windows, watch: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return the loss in nats and, if watched, the sums of `watched_tokens`."""
        if not len(batch.row):
            return zero_loss(self), torch.zeros(2, device=self.target.device)
        read, tokens, counts, log_p = self.read(batch)
        loss = step_loss(self.head, read, tokens, counts, log_p, self.options)
        if not watch:
            return loss, None

        def watched_sums(piece: slice) -> Tensor:
            return watched_tokens(self.head, read(piece), tokens[piece], log_p(piece))

        with torch.no_grad():
            return loss, in_chunks(watched_sums, len(tokens[:WATCHED]), chunk_size(self.options, self.head))

    def read(self, batch: Windows) -> tuple[Reader, Tensor, Tensor, Reader]:
        """Return the reader of the head's input, tokens [B, n], counts [n], and the reader of log p_k [., n, V]."""
        device, window = self.target.device, self.options.window
        if isinstance(self.head, BackboneHead):  # sort by row: chunks then have few rows
            order = (batch.row * batch.hidden.shape[1] + batch.start).argsort()
            batch = batch.each(lambda value: value[order])
        tokens, counts, row, start = (part.to(device) for part in (batch.tokens, batch.counts, batch.row, batch.start))
        read, verified = self._reader(batch.hidden.to(device), batch.document.to(device), row, start, tokens[:, 0])

        def log_p(piece: slice) -> Tensor:
            with torch.no_grad(), torch.autocast(device.type, enabled=False):
                states = window_states(verified, row[piece], start[piece], window)
                return self.target.logits(states).log_softmax(-1)

        return read, tokens, counts, log_p

    def _reader(
        self, hidden: Tensor, document: Tensor, row: Tensor, start: Tensor, first: Tensor
    ) -> tuple[Reader, Tensor]:
        """Return the reader of the head's input, in the head's dtype, and the target's states [R, S, D]."""
        dtype = self.head.hidden_dtype
        if isinstance(self.head, BackboneHead):
            size = self.target.hidden_size
            rows, of_row = row.unique(return_inverse=True)
            with torch.autocast(hidden.device.type, torch.bfloat16, enabled=self.options.precision == "bf16"):
                aux, position = hidden[rows, :, :-size], document_positions(document)[rows]
                context = self.head.context(aux, position, document[rows])
            first = first.clamp(min=0)
            return lambda some: self.head.read(context, of_row[some], start[some], first[some]), hidden[..., -size:]
        drafted = verified = hidden
        if isinstance(self.head, HostedHead):
            drafted, verified = hidden.split(self.target.hidden_size, -1)
        if self.layers is not None:  # `hidden` is the input of the draft layers
            drafted, verified = self.layers.draft(hidden, document), self.layers.plain(hidden, document)
        drafted = drafted[row, start].to(dtype)
        return lambda some: drafted[some], verified


def watched_tokens(head: Head, hidden: Tensor, tokens: Tensor, log_p: Tensor) -> Tensor:
    """Return sums [2] over windows: expected tokens at T=1 of a step that starts there, and windows.

    Args:
        head: The head.
        hidden: Its input for B windows.
        tokens: [B, n] int64, the text of the target.
        log_p: [B, n, V], log p_k of the target.
    """
    log_q = conditionals(head.circuit, head(hidden), tokens)
    ratio = (_at(log_q, tokens) - _at(log_p, tokens))[:, 1:].clamp(max=0).exp()
    alive = ratio.masked_fill(tokens[:, 1:] < 0, 0).cumprod(1)  # [B, n - 1], P(drafts 2 .. k are accepted)
    windows = (tokens[:, 0] >= 0).sum()
    return torch.stack([alive.sum() + windows, windows.to(alive.dtype)])
