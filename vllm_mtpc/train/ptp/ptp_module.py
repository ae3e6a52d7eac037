"""The training step of a PTP head: u of windows, drafts and losses, and the blocks that windows are read from.

A window at t holds the tokens x_1 .. x_n that follow and u_1 .. u_n, each inside the interval of its token under the
target's processed distribution. Rows of o-ptp predict x_1 .. x_n from u_1 .. u_n; rows of c-ptp give the distributions
of x_2 .. x_n from u_1 .. u_(n-1). From the first token on that has no mass, or is not trained, rows have no loss. A row
of x_k has weight gamma^(k-1) / sum, divided by the windows of the step with an x_k. The student's text is that of a
step of serving: u is uniform, the student drafts, the target selects; rows have a loss up to the first rejection.

The target is frozen: its states of a block of rows are computed once and held while steps draw windows from it.

Losses: arXiv 2512.21323, section 2.2 and appendix C.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vllm_mtpc.data.rows import Rows
from vllm_mtpc.heads.ptp.distribution import STEPS, edges, log_likelihood, processed, u_inside
from vllm_mtpc.heads.ptp.student import Prefix, Student
from vllm_mtpc.hf import Target
from vllm_mtpc.kernels.pick import pick
from vllm_mtpc.train.losses import CHUNK_BYTES, WATCHED, in_chunks
from vllm_mtpc.train.options import TrainOptions
from vllm_mtpc.train.windows import Windows, window_states

DISTRIBUTION_BYTES = 1 << 28  # of distributions over the vocabulary in memory at the same time
DISTRIBUTION_SHARE = 0.1  # of the distribution without u, so that no token has probability 0
FLOOR = math.log(1e-6)  # of log Q in the reverse KL: Q is zero outside top-k and top-p
NEED_DISTRIBUTION = {"kl", "reverse-kl"}
OF_VARIANT = {  # the first is the default
    "o-ptp": ("ce", "bce"),
    "c-ptp": ("kl", "reverse-kl", "inverse"),
    "late": ("kl", "ce"),
    "independent": ("ce", "bce", "kl"),
}


def loss_name(options: TrainOptions) -> str:
    """Return the loss of a run; the default depends on the variant. Raises ValueError for one that it does not have."""
    allowed = OF_VARIANT[options.variant]
    if options.ptp_loss not in (None, *allowed):
        raise ValueError(
            f"ptp_loss {options.ptp_loss!r} with variant {options.variant!r}: allowed are {', '.join(allowed)}; set "
            "ptp_loss to one of them"
        )
    return options.ptp_loss or allowed[0]


def row_losses(
    name: str, logits: Tensor, tokens: Tensor, log_q: Tensor | None, u: Tensor | None = None, trust: float | None = None
) -> Tensor:
    """Return the loss [...] of each row in nats, between its distribution P (logits [..., V]) and the target's.

    "ce": cross entropy of tokens [...], those below 0 read as 0; with `trust` of the distribution given u [...], inside
    the tokens' intervals. "bce": binary cross entropy of sigmoid(logit) against 1{token is x}, summed over tokens.
    "inverse": cross entropy of text with u inside the student's own intervals. "kl": KL(Q || P), and "reverse-kl":
    KL(P || Q) with Q >= 1e-6, of log Q [..., V].
    """
    tokens = tokens.clamp(min=0)
    if name == "ce" and trust is not None:
        return -log_likelihood(logits, u, tokens, trust, DISTRIBUTION_SHARE)
    if name == "bce":
        return F.softplus(logits).sum(-1) - logits.gather(-1, tokens[..., None])[..., 0]
    if name not in NEED_DISTRIBUTION:
        return F.cross_entropy(logits.flatten(0, -2), tokens.flatten(), reduction="none").view(tokens.shape)
    assert log_q is not None
    log_p = logits.log_softmax(-1)
    if name == "kl":
        return (log_q.exp() * (log_q.clamp(min=torch.finfo(log_q.dtype).min) - log_p)).sum(-1)
    return (log_p.exp() * (log_p - log_q.clamp(min=FLOOR))).sum(-1)


class Block(NamedTuple):
    prefix: Prefix  # states, keys and values of the target
    left: Tensor  # [R, S - 1] float64, start of the interval of token t + 1 under the target's distribution at t
    right: Tensor  # [R, S - 1] float64, its end


@dataclass
class PrefixSource:
    """Rows of the target, computed block by block."""

    student: Student
    rows: Rows
    options: TrainOptions

    @torch.no_grad()
    def hidden(self, row_indices: Tensor) -> Block:
        tokens, documents = self.rows.tokens[row_indices], self.rows.document[row_indices]
        parts = zip(*(part.split(Target.rows_at_once) for part in (tokens, documents)), strict=True)
        hidden, layers, documents = zip(*(self.student.prefix(*part) for part in parts), strict=True)
        pairs = (zip(*layer, strict=True) for layer in zip(*layers, strict=True))
        whole = [(torch.cat(keys), torch.cat(values)) for keys, values in pairs]
        prefix = Prefix(torch.cat(hidden), whole, torch.cat(documents))
        following, states = tokens[:, 1:].to(prefix.hidden.device), prefix.hidden[:, :-1]
        places = max(1, DISTRIBUTION_BYTES // (16 * self.student.target.vocab_size))
        found = [
            edges(distribution_of(self.student, some, self.options), token)
            for some, token in zip(states.flatten(0, 1).split(places), following.flatten().split(places), strict=True)
        ]
        left, right = (torch.cat(parts).view(following.shape) for parts in zip(*found, strict=True))
        return Block(prefix, left, right)


def distribution_of(student: Student, hidden: Tensor, options: TrainOptions) -> Tensor:
    """Return log Q, [..., V] float32: the target's processed distribution at its states hidden [..., D]."""
    return processed(student.logits(hidden), options.temperature, options.top_k, options.top_p)


def draw_numbers(window: int, beta: float, seed: int, count: int) -> Tensor:
    """Return [count, 2, n] in [0, 1): Beta(b, b) positions in intervals, and uniform numbers."""
    generator = np.random.default_rng(seed)
    numbers = np.stack([generator.beta(beta, beta, (count, window)), generator.random((count, window))], 1)
    return torch.from_numpy(numbers.astype(np.float32)).clamp(max=1 - 2**-24)


class Text(NamedTuple):
    tokens: Tensor  # [B, n] int64, x_1 .. x_n
    u: Tensor  # [B, n] float32, inside the intervals of the tokens
    usable: Tensor  # [B, n] bool, the token and all before it are trained and have mass
    states: Tensor | None  # [B, n, D], the target's states that predict x_1 .. x_n; None: those of the prefix


class PtpModule(nn.Module):
    """The trained module: the student on windows of text."""

    def __init__(self, student: Student, options: TrainOptions) -> None:
        super().__init__()
        self.head, self.options, self.loss = student, options, loss_name(options)

    def forward(self, batch: Windows, watch: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return the loss in nats and, if watched, sums [2]: tokens of steps that start at these windows, windows."""
        student, first = self.head, 1 - self.head.first_row  # tokens of a window before the first row's
        device = student.target.device
        if not len(batch.row):  # no windows in this process; the others wait for its gradient
            return sum(value.sum() for value in self.parameters()) * 0.0, torch.zeros(2, device=device)
        batch, counts = batch.each(lambda value: value.to(device)), batch.counts.to(device)
        weights = self.options.gamma ** torch.arange(first, len(counts), device=device)
        weights = weights / weights.sum() / counts[first:].clamp(min=1)

        def loss(piece: slice) -> Tensor:
            return self._loss(batch.each(lambda value: value[piece]), weights)

        size = self.options.chunk_windows or default_chunk(student, batch)
        return in_chunks(loss, len(batch.row), size), self._watched(batch) if watch else None

    def _loss(self, batch: Windows, weights: Tensor) -> Tensor:
        student, first, prefix = self.head, 1 - self.head.first_row, batch.hidden.prefix
        with torch.no_grad():
            text = self._text(batch)
        log_q, states = None, text.states
        if self.loss in NEED_DISTRIBUTION:
            if states is None:
                states = window_states(prefix.hidden, batch.row, batch.start, batch.tokens.shape[1])
            log_q = distribution_of(student, states[:, first:], self.options)
        with torch.autocast(batch.row.device.type, torch.bfloat16, enabled=self.options.precision == "bf16"):
            states = student.aux(prefix, batch.row, batch.start, text.u[:, : text.u.shape[1] - first])
        logits = student.logits(student.states(states, text.tokens))
        tokens, u, trust = text.tokens[:, first:], text.u[:, first:], student.config.distribution_trust
        values = row_losses(self.loss, logits, tokens, log_q, u, trust)
        return (values.masked_fill(~text.usable[:, first:], 0) * weights).sum()

    def _text(self, batch: Windows) -> Text:
        if self.options.proposals == "student":
            return self._student_text(batch)
        return self._inverse_text(batch) if self.loss == "inverse" else self._data_text(batch, batch.draws[:, 0])

    def _data_text(self, batch: Windows, inner: Tensor) -> Text:
        """Return the text of the data with u inside the target's intervals."""
        tokens, block = batch.tokens, batch.hidden
        place = batch.row, batch.start, tokens.shape[1]
        left, right = window_states(block.left, *place), window_states(block.right, *place)
        usable = (tokens >= 0) & (right - left >= 1 / STEPS)
        return Text(tokens, u_inside(left, right, inner), _leading(usable), None)

    def _student_text(self, batch: Windows) -> Text:
        """Return the tokens that the target selects after the student's drafts, usable up to the first rejected one."""
        student, options, prefix, row, start = self.head, self.options, batch.hidden.prefix, batch.row, batch.start
        u, state = batch.draws[:, 1], prefix.hidden[row, start]
        made = drafts(student, batch.hidden, row, start, u, distribution_of(student, state, options))  # [B, n]
        states = torch.cat([state[:, None], student.plain(prefix, row, start, made[:, :-1])], 1)
        tokens = pick(distribution_of(student, states, options).flatten(0, 1), u.flatten()).view(u.shape)
        right = torch.cat([torch.ones_like(made[:, :1]), (made == tokens)[:, :-1]], 1)
        return Text(tokens, u, _leading((batch.tokens >= 0) & (right > 0)), states)

    def _inverse_text(self, batch: Windows) -> Text:
        """Return the text of the data with u inside the student's own intervals, row by row (no teacher)."""
        student, prefix, row, start = self.head, batch.hidden.prefix, batch.row, batch.start
        tokens, inner = batch.tokens, batch.draws[:, 0]
        chosen, u = tokens.clamp(min=0), torch.zeros_like(inner)
        log_p = distribution_of(student, prefix.hidden[row, start], self.options)
        for k in range(tokens.shape[1]):
            u[:, k] = u_inside(*edges(log_p, chosen[:, k]), inner[:, k])
            if k + 1 < tokens.shape[1]:
                states = student.aux(prefix, row, start, u[:, : k + 1])
                log_p = student.logits(student.states(states, chosen)[:, -1]).log_softmax(-1)
        return Text(tokens, u, _leading(tokens >= 0), None)

    @torch.no_grad()
    def _watched(self, batch: Windows) -> Tensor:
        """Return sums [2]: 1 and the leading correct drafts for u uniform inside the intervals; windows."""
        batch = batch.each(lambda value: value[:WATCHED])
        text = self._data_text(batch, batch.draws[:, 1])
        first = text.tokens[:, 0].clamp(min=0)
        made = self.head.draft(batch.hidden.prefix, batch.row, batch.start, text.u, first)
        right = _leading((made == text.tokens[:, 1:]) & text.usable[:, 1:])
        windows = text.usable[:, 0].sum()
        return torch.stack([right.sum() + windows, windows]).float()


def drafts(student: Student, block: Block, row: Tensor, start: Tensor, u: Tensor, log_p: Tensor) -> Tensor:
    """Return the student's tokens [B, n] from u [B, n], after the tokens of a block at (row [B], start [B]).

    log_p: [B, V], log Q of the first token, which c-ptp leaves to the target.
    """
    if student.first_row:
        token = student.logits(student.aux(block.prefix, row, start, u[:, :1])[:, 0]).argmax(-1)
    else:
        token = pick(log_p, u[:, 0].contiguous())
    return torch.cat([token[:, None], student.draft(block.prefix, row, start, u, token)], 1)


def default_chunk(student: Student, batch: Windows) -> int:
    """Return the number of windows whose rows need about 1 GiB of activations."""
    text = student.target.config
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    scores = 3 * text.num_attention_heads * (batch.document.shape[1] + batch.tokens.shape[1])
    row = 4 * (3 * student.target.vocab_size + student.config.num_layers * (16 * text.hidden_size + 4 * inner + scores))
    return max(1, CHUNK_BYTES // (row * batch.tokens.shape[1]))


def _leading(right: Tensor) -> Tensor:
    return right.long().cumprod(1).bool()
