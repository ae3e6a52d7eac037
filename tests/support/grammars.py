"""A grammar that counts."""

from __future__ import annotations

import torch
from torch import Tensor

VOCAB = 40


class Counting:
    """A grammar whose k-th token must be at least k, and which ends with the token 9."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        for token in tokens:
            if token < len(self.read) and not self.is_terminated():
                return False
            self.read.append(token)
        return True

    def is_terminated(self) -> bool:
        return 9 in self.read

    def rollback(self, count: int) -> None:
        del self.read[len(self.read) - count :]

    def fill_bitmask(self, bitmask: Tensor, row: int) -> None:
        allowed = [token for token in range(VOCAB) if token >= len(self.read)]
        words = [sum(1 << token % 32 for token in allowed if token // 32 == word) for word in range(2)]
        bitmask[row] = torch.tensor([word - (1 << 32) if word >> 31 else word for word in words], dtype=torch.int32)
