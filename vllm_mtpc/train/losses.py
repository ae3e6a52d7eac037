"""Losses of a window, from the circuit's exact conditionals and the target's distribution.

With q_k = q(. | x_<k, h) the draft's conditionals, p_k the target's distribution at the same place and weights
w_k = gamma^(k-1) / sum:

    CE_k  = -log q_k(x_k)                                               (MtPC paper, eq. 4 and section 4)
    KL_k  = KL(p_k || q_k) or KL(q_k || p_k), over the vocabulary or over {x_k, the rest} (appendix G)
    L     = (1 - a) sum_k w_k mean[(1 - beta) CE_k + beta KL_k] + a A

Serving gives x_1 and accepts a draft v with probability min(1, p/q), so draft k survives, given the ones before it,
with probability overlap_k = sum_v min(p_k(v), q_k(v)), 1 - overlap_k being the total variation. A is one of

    length  -sum_{k>=2} mean[ prod_{1<j<k} min(1, q_j(x_j) / p_j(x_j)) overlap_k ] / (n - 1)
    tv       sum_{k>=2} w_k mean[1 - overlap_k]
    log      sum_{k>=2} w_k mean[-log overlap_k]

On text x of the target itself, `length` is minus the expected number of accepted drafts, exactly: a token that came
out as x_j was an accepted draft with probability min(1, q_j/p_j)(x_j) (see eval/acceptance.py).

Means are over windows with a token at k; positions without one are marginalised and carry no loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vllm_mtpc.circuits import Circuit, CircuitParams
from vllm_mtpc.circuits.conditionals import conditionals
from vllm_mtpc.heads.adapters import DraftLayers
from vllm_mtpc.heads.backbone import BackboneHead
from vllm_mtpc.heads.base import Head
from vllm_mtpc.hf import Target
from vllm_mtpc.hf.attention import document_positions
from vllm_mtpc.train.options import TrainOptions
from vllm_mtpc.train.windows import Windows, window_states

CHUNK_BYTES = 1 << 30
COPIES = 4  # logits, log-softmax, its exponential and a gradient exist at once
WATCHED = 128  # windows of a step that the running estimate of tokens/step is measured on
Reader = Callable[[slice], Tensor]  # something of some of the windows
TINY = torch.finfo(torch.float32).tiny


def position_weights(options: TrainOptions) -> Tensor:
    """w_k [n], summing to 1; the first is 0 where x_1 is not learnt."""
    weights = options.gamma ** torch.arange(options.window, dtype=torch.float64)
    if not options.train_first:
        weights[0] = 0
    return weights / weights.sum()


class Overlaps(NamedTuple):
    """What acceptance losses are made of, for drafts 2 .. n of B windows."""

    overlap: Tensor  # [B, n - 1], sum_v min(p_k(v), q_k(v))
    kept: Tensor  # [B, n - 1] bool, there is a token
    ratio: Tensor  # [B, n - 1], log q_k(x_k) - log p_k(x_k)
    weights: Tensor  # [n - 1], w_k by the windows of the step that have a token at k
    mean: Tensor  # scalar, 1 by the windows that have a second token


def length_loss(of: Overlaps) -> Tensor:
    """Minus the expected number of accepted drafts, by n - 1."""
    survived = of.ratio[:, :-1].clamp(max=0).masked_fill(~of.kept[:, :-1], 0).cumsum(1).exp()
    alive = torch.nn.functional.pad(survived, (1, 0), value=1.0)  # [B, n - 1]
    return -(alive * of.overlap).masked_fill(~of.kept, 0).sum() * of.mean / of.overlap.shape[1]


def tv_loss(of: Overlaps) -> Tensor:
    """Total variation between the target and the draft."""
    return ((1 - of.overlap).masked_fill(~of.kept, 0) * of.weights).sum()


def log_loss(of: Overlaps) -> Tensor:
    """-log of the overlap."""
    return (-of.overlap.clamp(min=TINY).log().masked_fill(~of.kept, 0) * of.weights).sum()


LOSSES = {"length": length_loss, "tv": tv_loss, "log": log_loss}  # A, by `acceptance_form`


def window_loss(
    circuit: Circuit, params: CircuitParams, tokens: Tensor, log_p: Tensor | None, options: TrainOptions, counts: Tensor
) -> Tensor:
    """This batch's share of L: terms summed over windows, divided by counts[n] (of the whole step). Scalar, nats.

    tokens: [B, n] int64 with -1; log_p: the target's log p_k [B, n, V], None where the options need none.
    """
    kept = tokens >= 0
    if log_p is None:
        log_q = None
        chosen = circuit.conditional_log_probs(params, tokens)  # [B, n]
    else:
        log_q = conditionals(circuit, params, tokens)  # [B, n, V]
        chosen = _at(log_q, tokens)
    means = 1 / counts.clamp(min=1).to(chosen)  # [n]
    weights = position_weights(options).to(chosen) * means
    terms = -(1 - options.beta) * chosen
    if options.beta > 0:
        terms = terms + options.beta * _kl(log_q, log_p, tokens, options)
    loss = (1 - options.acceptance) * (terms.masked_fill(~kept, 0) * weights).sum()
    if options.acceptance == 0:
        return loss
    overlap = torch.minimum(log_q, log_p).exp().sum(-1)
    rest = weights[1:] / position_weights(options)[1:].sum()
    parts = Overlaps(overlap[:, 1:], kept[:, 1:], (chosen - _at(log_p, tokens))[:, 1:], rest, means[1])
    return loss + options.acceptance * LOSSES[options.acceptance_form](parts)


def _kl(log_q: Tensor, log_p: Tensor, tokens: Tensor, options: TrainOptions) -> Tensor:
    """KL_k [B, n] in nats."""
    if options.kl_form == "binary":
        log_q, log_p = _against_rest(_at(log_q, tokens)), _against_rest(_at(log_p, tokens))  # [B, n, 2]
    first, second = (log_p, log_q) if options.kl == "forward" else (log_q, log_p)
    return (first.exp() * (first - second)).sum(-1)


def _at(log_probs: Tensor, tokens: Tensor) -> Tensor:
    """log_probs[B, n, V] at tokens[B, n] -> [B, n]."""
    return log_probs.gather(-1, tokens.clamp(min=0).unsqueeze(-1))[..., 0]


def _against_rest(log_prob: Tensor) -> Tensor:
    """log of (p, 1 - p), [..., 2]; 1 - p is kept above the smallest that float32 tells from 0."""
    p = log_prob.exp()
    return torch.stack([log_prob, (1 - p).clamp(min=torch.finfo(p.dtype).eps).log()], -1)


def chunk_size(options: TrainOptions, head: Head) -> int:
    """Windows whose logits, and states of draft layers of their own, exist at once."""
    if options.chunk_windows:
        return options.chunk_windows
    logits = options.window * options.num_components * head.vocab_size * 4 * COPIES
    return max(1, CHUNK_BYTES // (logits + (head.window_bytes if isinstance(head, BackboneHead) else 0)))


def step_loss(
    head: Head,
    read: Reader,
    tokens: Tensor,
    counts: Tensor,
    log_p: Reader,
    options: TrainOptions,
) -> Tensor:
    """L of the windows of a step, chunk by chunk, each recomputed in the backward pass where there are several.

    read(windows): what the head reads of some windows, [., D] or as it says; tokens: [B, n]; counts: [n];
    log_p(windows): the target's log p_k [., n, V], asked for only where the options need it.
    """

    def chunk_loss(piece: slice) -> Tensor:
        target = log_p(piece) if options.needs_distribution else None
        # The head's products alone are cast: its logits return as float32, and so the circuit is.
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=options.precision == "bf16"):
            params = head(read(piece))
        return window_loss(head.circuit, params, tokens[piece], target, options, counts)

    size = chunk_size(options, head)
    return in_chunks(chunk_loss, len(tokens), size, options.checkpoint_circuit)


def in_chunks(loss: Callable[[slice], Tensor], windows: int, size: int, recompute: bool = False) -> Tensor:
    """The sum of a loss over chunks of `size` windows; each is computed again in the backward pass where there are
    several, so that one exists at a time, or with `recompute`."""
    pieces = [slice(first, min(first + size, windows)) for first in range(0, windows, size)]
    recompute = recompute or len(pieces) > 1
    return sum(checkpoint(loss, piece, use_reentrant=False) if recompute else loss(piece) for piece in pieces)


class Drafter(nn.Module):
    """The head, with draft layers where it has some. The target stays outside: it is neither trained nor sharded."""

    def __init__(self, head: Head, target: Target, options: TrainOptions, layers: DraftLayers | None = None) -> None:
        super().__init__()
        self.head = head
        self.layers = layers
        self.options = options
        self._target = [target]  # in a list, so that it is no submodule

    @property
    def target(self) -> Target:
        return self._target[0]

    def forward(self, batch: Windows, watch: bool = False) -> tuple[Tensor, Tensor | None]:
        """The loss (nats, scalar) and, when watched, the expected tokens of a step started at these windows."""
        read, tokens, counts, log_p = self._read(batch)
        loss = step_loss(self.head, read, tokens, counts, log_p, self.options)
        if not watch:
            return loss, None
        with torch.no_grad():
            some = slice(0, WATCHED)
            return loss, watched_tokens(self.head, read(some), tokens[some], log_p(some))

    def _read(self, batch: Windows) -> tuple[Reader, Tensor, Tensor, Reader]:
        """What the head reads of some of the windows, tokens [B, n], counts [n], and log p_k [., n, V] of some."""
        device, window = self.target.device, self.options.window
        if not len(batch.row):  # other processes have windows in this step, and wait for this one's gradient
            batch = _masked(batch, window)
        if isinstance(self.head, BackboneHead):  # the windows of a row side by side: chunks then have few rows
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
        """What the head reads of some windows, and the target's states [R, S, D], from what is held of the rows.

        In the head's dtype, as when it is served; autocast takes care of the products.
        """
        dtype = self.head.hidden_dtype
        if isinstance(self.head, BackboneHead):
            size = self.target.hidden_size
            rows, own = row.unique(return_inverse=True)
            with torch.autocast(hidden.device.type, torch.bfloat16, enabled=self.options.precision == "bf16"):
                aux, position = hidden[rows, :, :-size], document_positions(document)[rows]
                context = self.head.context(aux, position, document[rows])
            first = first.clamp(min=0)
            return lambda some: self.head.read(context, own[some], start[some], first[some]), hidden[..., -size:]
        drafted = verified = hidden
        if self.layers is not None:  # `hidden` is what enters the draft layers
            drafted, verified = self.layers.draft(hidden, document), self.layers.verifier(hidden, document)
        drafted = drafted[row, start].to(dtype)
        return lambda some: drafted[some], verified


def _masked(batch: Windows, window: int) -> Windows:
    """A batch without windows as one window without tokens: no loss, a gradient of zero."""
    hidden, document = batch.hidden, batch.document
    if not len(hidden):
        hidden, document = hidden.new_zeros(1, *hidden.shape[1:]), document.new_zeros(1, *document.shape[1:])
    tokens, first = batch.tokens.new_full((1, window), -1), torch.zeros(1, dtype=torch.long)
    return batch._replace(tokens=tokens, row=first, start=first, hidden=hidden, document=document)


def watched_tokens(head: Head, hidden: Tensor, tokens: Tensor, log_p: Tensor) -> Tensor:
    """Sums [2] over windows [B]: tokens a step started there is expected to gain at T=1 on this text, and windows."""
    log_q = conditionals(head.circuit, head(hidden), tokens)
    ratio = (_at(log_q, tokens) - _at(log_p, tokens))[:, 1:].clamp(max=0).exp()
    alive = ratio.masked_fill(tokens[:, 1:] < 0, 0).cumprod(1)  # [B, n - 1], P(drafts 2 .. k are accepted | the text)
    windows = (tokens[:, 0] >= 0).sum()
    return torch.stack([alive.sum() + windows, windows.to(alive.dtype)])
