"""The contract of a trunk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vllm_mtpc.errors import HeadConfigError
from vllm_mtpc.heads.sections import Section

Windows = Callable[[slice], Tensor]  # what the trunk reads for some of the windows


class Trunk(nn.Module, ABC):
    """Computes the states of windows from what the target computed. `Options` is its section of `config.json`.

    Args:
        options: its `Options`.
        window: n, x_1 included.
        hidden_size: D.
    """

    Options: ClassVar[type[Section]]
    sees_first: ClassVar[bool] = False  # states are conditioned on x_1: leaves and evidence start at x_2
    needs_embedding: ClassVar[bool] = False  # the target's embeddings are bound to it, neither trained nor saved
    predicts_drafts: ClassVar[bool] = False  # untrained leaves are the states' own distributions
    aux_layers: tuple[int, ...] = ()  # of the target, whose states are read besides the last; 0: the embeddings

    def __init__(self, options: Any, window: int, hidden_size: int) -> None:
        super().__init__()
        self.options, self.window, self.hidden_size = options, window, hidden_size
        self._embedding: tuple[Callable[[Tensor], Tensor], ...] = ()  # in a tuple: neither submodule nor parameter

    @property
    def is_per_position(self) -> bool:
        """Whether there is a state for each draft, not one for all."""
        return False

    @abstractmethod
    def forward(self, hidden: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the state that the sums read [B, D], and those of the leaves, [B, 1, D] or one for each position.

        Args:
            hidden: [B, D], or states of windows [B, Q, D] that `windows` or a server computed.
            first: [B] int64, x_1; None only where `sees_first` is false.
        """

    def reset_parameters(self) -> None:
        """Initialise the parameters from torch's own generator."""

    def windows(self, hidden: Tensor, document: Tensor, row: Tensor, start: Tensor, first: Tensor) -> Windows:
        """Return the reader of windows in R rows of text.

        Args:
            hidden: [R, S, (m + 1) D], states of the `aux_layers` and the last one.
            document: [R, S] int, number of the document.
            row: [B] int64, of a window.
            start: [B] int64, index of the last token that a window reads.
            first: [B] int64, x_1.
        """
        read = hidden[row, start, -self.hidden_size :]
        return lambda some: read[some]

    def bind_embedding(self, embedding: Callable[[Tensor], Tensor]) -> None:
        """Set the target's embeddings: token ids [...] -> [..., D], as they enter its first layer."""
        self._embedding = (embedding,)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the target's embeddings [..., D] of token ids [...].

        Raises:
            HeadConfigError: none are bound.
        """
        if not self._embedding:
            raise HeadConfigError(
                f"trunk {self.options.kind!r} reads the target's embeddings and none are bound; call "
                "head.trunk.bind_embedding(...)"
            )
        return self._embedding[0](tokens)


def document_positions(documents: Tensor) -> Tensor:
    """Return positions [B, S] int64 of the tokens of documents [B, S], restarting at 0 in each document."""
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    return index - torch.where(first, index, 0).cummax(1).values
