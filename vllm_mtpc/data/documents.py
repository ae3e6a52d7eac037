"""Documents in two flat arrays: token ids, and which of them are targets of the loss."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Documents:
    """Document i is `tokens[offsets[i] : offsets[i + 1]]`; five bytes per token, however many documents."""

    tokens: np.ndarray  # [T] int32
    trained: np.ndarray  # [T] bool: the token is a target of the loss
    offsets: np.ndarray  # [N + 1] int64

    @classmethod
    def join(cls, documents: Iterable[tuple[Sequence[int] | np.ndarray, Sequence[bool] | np.ndarray]]) -> Documents:
        """Documents from (tokens, trained) pairs."""
        tokens, trained = [np.empty(0, np.int32)], [np.empty(0, bool)]
        for ids, mask in documents:
            tokens.append(np.asarray(ids, np.int32))
            trained.append(np.asarray(mask, bool))
        offsets = np.cumsum([0, *(len(ids) for ids in tokens[1:])], dtype=np.int64)
        return cls(np.concatenate(tokens), np.concatenate(trained), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, trained) of a document, both views."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        part = slice(self.offsets[index], self.offsets[index + 1])
        return self.tokens[part], self.trained[part]

    @property
    def lengths(self) -> np.ndarray:
        """[N] int64, tokens of each document."""
        return np.diff(self.offsets)

    def select(self, chosen: np.ndarray) -> Documents:
        """The documents where chosen, [N] bool, is true, in their order."""
        tokens = np.repeat(chosen, self.lengths)
        offsets = np.concatenate([[0], np.cumsum(self.lengths[chosen])])
        return Documents(self.tokens[tokens], self.trained[tokens], offsets)
