"""What one training step runs: from windows to the loss, as one module that can be wrapped for several processes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vllm_mtpc.circuits.conditionals import conditionals
from vllm_mtpc.heads.adapters import DraftLayers
from vllm_mtpc.heads.base import Head
from vllm_mtpc.hf import Target
from vllm_mtpc.train.losses import step_loss
from vllm_mtpc.train.options import TrainOptions
from vllm_mtpc.train.windows import Windows, window_states

ZERO = torch.zeros(1, dtype=torch.long)
WATCHED = 128  # windows of a step that the running estimate of tokens/step is measured on


class Drafter(nn.Module):
    """The head, with draft layers where it has some. The target stays outside: it is neither trained nor sharded."""

    def __init__(self, head: Head, target: Target, options: TrainOptions, layers: DraftLayers | None = None) -> None:
        super().__init__()
        self.head = head
        self.layers = layers
        self.options = options
        self._target = [target]  # in a list, so that it is no submodule
        if head.needs_lm_head:
            head.bind_lm_head(target.logits)

    @property
    def target(self) -> Target:
        return self._target[0]

    def forward(self, batch: Windows, watch: bool = False) -> tuple[Tensor, Tensor | None]:
        """The loss (nats, scalar) and, when watched, the expected tokens of a step started at these windows."""
        device, window = self.target.device, self.options.window
        if not len(batch.row):  # other processes have windows in this step, and wait for this one's gradient
            batch = _masked(batch, window)
        tokens, counts, row, start = (part.to(device) for part in (batch.tokens, batch.counts, batch.row, batch.start))
        hidden = batch.hidden.to(device)
        if self.layers is None:
            drafted = verified = hidden
        else:  # `hidden` is what enters the draft layers
            drafted, verified = self.layers.draft(hidden, batch.document), self.layers.verifier(hidden, batch.document)

        def law(piece: slice) -> Tensor:
            with torch.no_grad(), torch.autocast(device.type, enabled=False):
                states = window_states(verified, row[piece], start[piece], window)
                return self.target.logits(states).log_softmax(-1)

        read = drafted[row, start]
        # Draft states in the head's dtype, as when it is served; autocast takes care of the products.
        read = read.to(next(self.head.parameters()).dtype)
        loss = step_loss(self.head, read, tokens, counts, law, self.options)
        if not watch:
            return loss, None
        with torch.no_grad():
            some = slice(0, WATCHED)
            return loss, watched_tokens(self.head, read[some], tokens[some], law(some))


def _masked(batch: Windows, window: int) -> Windows:
    """A batch without windows as one window without tokens: no loss, a gradient of zero."""
    hidden, document = batch.hidden, batch.document
    if not len(hidden):
        hidden, document = hidden.new_zeros(1, *hidden.shape[1:]), document.new_zeros(1, *document.shape[1:])
    tokens = batch.tokens.new_full((1, window), -1)
    return batch._replace(tokens=tokens, row=ZERO, start=ZERO, hidden=hidden, document=document)


def watched_tokens(head: Head, hidden: Tensor, tokens: Tensor, law: Tensor) -> Tensor:
    """Sums [2] over windows [B]: tokens a step started there is expected to gain at T=1 on this text, and windows."""
    log_q = conditionals(head.circuit, head(hidden), tokens)
    chosen = tokens.clamp(min=0).unsqueeze(-1)
    ratio = (log_q.gather(-1, chosen) - law.gather(-1, chosen))[:, 1:, 0].clamp(max=0).exp()
    alive = ratio.masked_fill(tokens[:, 1:] < 0, 0).cumprod(1)
    windows = (tokens[:, 0] >= 0).sum()
    return torch.stack([alive.sum() + windows, windows.to(alive.dtype)])
