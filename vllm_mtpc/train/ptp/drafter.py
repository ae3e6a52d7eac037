"""What one training step of a PTP head runs: from windows to the loss, as one module.

A window at t holds the text's tokens x_1 .. x_n behind it and u_1 .. u_n, each inside the interval of its token under
the target's processed distribution. Rows of o-ptp name x_1 .. x_n from u_1 .. u_n; rows of c-ptp give the
distributions of x_2 .. x_n from u_1 .. u_(n-1). From the first token on that has no mass, or is not trained on, rows
carry no loss. A row that names x_k counts gamma^(k-1) / sum, divided by the windows of the step that have an x_k.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vllm_mtpc.eval.ptp_acceptance import draft
from vllm_mtpc.heads.ptp.distribution import STEPS, edges, u_inside
from vllm_mtpc.heads.ptp.student import Student
from vllm_mtpc.kernels.pick import pick
from vllm_mtpc.train.options import TrainOptions
from vllm_mtpc.train.ptp.losses import NEED_LAW, loss_name, row_losses
from vllm_mtpc.train.ptp.source import Block, law_of
from vllm_mtpc.train.windows import Windows, window_states

CHUNK_BYTES = 1 << 30
WATCHED = 128  # windows of a step that the running estimate of tokens/step is measured on


class Text(NamedTuple):
    """What B windows are trained on."""

    tokens: Tensor  # [B, n] int64, x_1 .. x_n
    u: Tensor  # [B, n] float32, inside their intervals
    usable: Tensor  # [B, n] bool, a token of the data that the distribution can pick, and all before it are
    states: Tensor | None  # [B, n, D], the target's, that predict x_1 .. x_n; None: those of the prefix


class PtpDrafter(nn.Module):
    """The student on windows of the text. The target stays outside: it is neither trained nor sharded."""

    def __init__(self, student: Student, options: TrainOptions) -> None:
        super().__init__()
        self.head = student
        self.options = options
        self.loss = loss_name(options)

    def forward(self, batch: Windows, watch: bool = False) -> tuple[Tensor, Tensor | None]:
        """The loss (nats, scalar) and, when watched, sums [2]: tokens of steps started at these windows, windows."""
        student, options = self.head, self.options
        device, counts = student.target.device, batch.counts.to(student.target.device)
        if not len(batch.row):  # other processes have windows in this step, and wait for this one's gradient
            return sum(value.sum() for value in student.parameters()) * 0.0, torch.zeros(2, device=device)
        weights = options.gamma ** torch.arange(len(counts), device=device)[self.first :]
        weights = weights / weights.sum() / counts[self.first :].clamp(min=1)
        size = options.chunk_windows or default_chunk(student, batch)
        pieces = torch.arange(len(batch.row)).split(size)
        total = torch.zeros((), device=device)
        for piece in pieces:
            if len(pieces) == 1:
                total = total + self._loss(batch, piece, weights)
            else:  # computed again in the backward pass, so that one chunk exists at a time
                total = total + checkpoint(self._loss, batch, piece, weights, use_reentrant=False)
        return total, self._watched(batch) if watch else None

    @property
    def first(self) -> int:
        """Tokens of a window before the first that a row names."""
        return 0 if self.head.config.variant == "o-ptp" else 1

    def _loss(self, batch: Windows, piece: Tensor, weights: Tensor) -> Tensor:
        student, options, first = self.head, self.options, self.first
        row, start, block = *_places(batch, piece, student), batch.hidden
        with torch.no_grad():
            text = self._text(batch, piece)
        log_q = None
        if self.loss in NEED_LAW:
            states = text.states
            if states is None:
                states = window_states(block.prefix.hidden, row, start, batch.tokens.shape[1])
            log_q = law_of(student, states[:, first:], options)
        with torch.autocast(row.device.type, torch.bfloat16, enabled=options.precision == "bf16"):
            states = student.aux(block.prefix, row, start, text.u[:, : text.u.shape[1] - first])
        logits = student.logits(student.states(states, text.tokens))
        tokens, u, trust = text.tokens[:, first:], text.u[:, first:], student.config.law_trust
        values = row_losses(self.loss, logits, tokens, log_q, u, trust)
        return (values.masked_fill(~text.usable[:, first:], 0) * weights).sum()

    def _text(self, batch: Windows, piece: Tensor) -> Text:
        draws = batch.draws[piece].to(self.head.target.device)
        if self.options.proposals == "student":
            return self._own_text(batch, piece, draws)
        if self.loss == "inverse":
            return self._inverse_text(batch, piece, draws[:, 0])
        return self._given_text(batch, piece, draws[:, 0])

    def _given_text(self, batch: Windows, piece: Tensor, inner: Tensor) -> Text:
        """The text of the data, u inside the target's intervals."""
        row, start = _places(batch, piece, self.head)
        tokens, block = batch.tokens[piece].to(row.device), batch.hidden
        at = (start[:, None] + torch.arange(tokens.shape[1], device=row.device)).clamp(max=block.left.shape[1] - 1)
        left, right = block.left[row[:, None], at], block.right[row[:, None], at]
        usable = (tokens >= 0) & (right - left >= 1 / STEPS)
        return Text(tokens, u_inside(left, right, inner), _leading(usable), None)

    def _own_text(self, batch: Windows, piece: Tensor, draws: Tensor) -> Text:
        """What the student makes of fresh u, u drawn again inside the target's intervals of it."""
        student, options, block = self.head, self.options, batch.hidden
        row, start = _places(batch, piece, student)
        tokens, fresh = batch.tokens[piece].to(row.device), draws[:, 1]
        state = block.prefix.hidden[row, start]
        made = drafts(student, block, row, start, fresh, law_of(student, state, options))  # [B, n]
        read = student.plain(block.prefix, row, start, made[:, :-1])
        states = torch.cat([state[:, None], read], 1)
        left, right = edges(law_of(student, states, options), made)
        usable = (tokens >= 0) & (right - left >= 1 / STEPS)
        return Text(made, u_inside(left, right, draws[:, 0]), _leading(usable), states)

    def _inverse_text(self, batch: Windows, piece: Tensor, inner: Tensor) -> Text:
        """The text of the data, u inside the student's own intervals: u_k needs the row before it (no teacher)."""
        student, block = self.head, batch.hidden
        row, start = _places(batch, piece, student)
        tokens = batch.tokens[piece].to(row.device)
        chosen, u = tokens.clamp(min=0), torch.zeros_like(inner)
        law = law_of(student, block.prefix.hidden[row, start], self.options)
        for k in range(tokens.shape[1]):
            u[:, k] = u_inside(*edges(law, chosen[:, k]), inner[:, k])
            if k + 1 < tokens.shape[1]:
                states = student.aux(block.prefix, row, start, u[:, : k + 1])
                law = student.logits(student.states(states, chosen)[:, -1]).log_softmax(-1)
        return Text(tokens, u, _leading(tokens >= 0), None)

    @torch.no_grad()
    def _watched(self, batch: Windows) -> Tensor:
        """Sums [2]: 1 and the leading drafts that are the text, u uniform inside its intervals; and windows."""
        piece = torch.arange(min(WATCHED, len(batch.row)))
        row, start = _places(batch, piece, self.head)
        text = self._given_text(batch, piece, batch.draws[piece, 1].to(row.device))
        law = law_of(self.head, batch.hidden.prefix.hidden[row, start], self.options)
        made = drafts(self.head, batch.hidden, row, start, text.u, law, text.tokens[:, 0])
        right = _leading((made == text.tokens)[:, 1:] & text.usable[:, 1:])
        windows = text.usable[:, 0].sum()
        return torch.stack([right.sum() + windows, windows]).float()


def drafts(
    student: Student,
    block: Block,
    row: Tensor,
    start: Tensor,
    u: Tensor,
    first_law: Tensor,
    known: Tensor | None = None,
) -> Tensor:
    """Tokens [B, n] that the student makes of u[B, n] behind (row, start).

    first_law: log Q [B, V] of the first token, which c-ptp leaves to the target (o-ptp names it itself); known[B]: that
    token, where the verifier has said it.
    """
    first, length = student.first_row, u.shape[1] - 1
    hidden = student.aux(block.prefix, row, start, u[:, : length + first])
    if known is not None:
        token = known.clamp(min=0)
    elif first:
        token = student.logits(hidden[:, 0]).argmax(-1)
    else:
        token = pick(first_law, u[:, 0].contiguous()) if student.config.informed else first_law.argmax(-1)
    return torch.cat([token[:, None], draft(student, hidden[:, first:], u[:, 1:], False, token)], 1)


def default_chunk(student: Student, batch: Windows) -> int:
    """Windows whose rows take about 1 GiB in a forward pass that is kept for the backward one."""
    text = student.target.config
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    scores = 3 * text.num_attention_heads * (batch.document.shape[1] + batch.tokens.shape[1])
    row = 4 * (3 * student.target.vocab_size + student.config.num_layers * (16 * text.hidden_size + 4 * inner + scores))
    return max(1, CHUNK_BYTES // (row * batch.tokens.shape[1]))


def _places(batch: Windows, piece: Tensor, student: Student) -> tuple[Tensor, Tensor]:
    device = student.target.device
    return batch.row[piece].to(device), batch.start[piece].to(device)


def _leading(right: Tensor) -> Tensor:
    """[B, n] bool: true up to the first that is not."""
    return right.long().cumprod(1).bool()
