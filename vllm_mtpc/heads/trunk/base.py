"""The contract of a trunk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from vllm_mtpc.errors import HeadConfigError
from vllm_mtpc.heads.sections import Section

Windows = Callable[[slice], Tensor]  # what the trunk reads for some of the windows


class Trunk(nn.Module, ABC):
    """Computes the states of windows from what the target computed; n = `window`, D = `hidden_size`.

    `Options` is its section of `config.json`.
    """

    Options: ClassVar[type[Section]]
    sees_first: ClassVar[bool] = False  # states are conditioned on x_1: leaves and evidence start at x_2
    needs_embedding: ClassVar[bool] = False  # the target's embeddings are bound to it, neither trained nor saved
    predicts_drafts: ClassVar[bool] = False  # untrained leaves are the states' own distributions
    is_per_position: bool = False  # there is a state for each draft, not one for all
    aux_layers: tuple[int, ...] = ()  # of the target, whose states are read besides the last; 0: the embeddings

    def __init__(self, options: Any, window: int, hidden_size: int) -> None:
        super().__init__()
        self.options, self.window, self.hidden_size = options, window, hidden_size
        self._embedding: tuple[Callable[[Tensor], Tensor], ...] = ()  # in a tuple: neither submodule nor parameter

    @abstractmethod
    def forward(self, hidden: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the state that the sums read [B, D], and those of the leaves, [B, 1, D] or one for each position.

        hidden: [B, D], or states of windows [B, Q, D] that `windows` or a server computed; first: [B] int64, x_1, None
        only where `sees_first` is false.
        """

    def reset_parameters(self) -> None:
        """Initialise the parameters from torch's own generator."""

    def windows(self, hidden: Tensor, document: Tensor, row: Tensor, start: Tensor, first: Tensor) -> Windows:
        """Return the reader of B windows in R rows of text; this one reads the first of the states.

        hidden: [R, S, (m + 1) D], states of the `aux_layers` and the last one; document: [R, S] int, its number. Of
        windows, [B] int64: row, start (index of the last token that is read), first (x_1).
        """
        read = hidden[row, start, : self.hidden_size]
        return lambda some: read[some]

    def bind_embedding(self, embedding: Callable[[Tensor], Tensor]) -> None:
        """Set the target's embeddings: token ids [...] -> [..., D], as they enter its first layer."""
        self._embedding = (embedding,)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the target's embeddings [..., D] of token ids [...]; raises HeadConfigError if none are bound."""
        if not self._embedding:
            raise HeadConfigError(
                f"trunk {self.options.kind!r} reads the target's embeddings and none are bound; call "
                "head.trunk.bind_embedding(...)"
            )
        return self._embedding[0](tokens)


class NoOptions(Section):
    """Section of `config.json`."""

    kind: Literal["none"] = Field(description="the target's last hidden state")


class NoTrunk(Trunk):
    """Returns the target's last hidden state h [B, D], which leaves and sums then read (MtPC paper, section 4)."""

    Options: ClassVar[type[Section]] = NoOptions

    def forward(self, hidden: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
        return hidden, hidden[:, None]


def document_positions(documents: Tensor) -> Tensor:
    """Return positions [B, S] int64 of the tokens of documents [B, S], restarting at 0 in each document."""
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    return index - torch.where(first, index, 0).cummax(1).values
