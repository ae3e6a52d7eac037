"""Greedy text of a test's reference model."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class GreedyReference(ABC):
    @abstractmethod
    def logits(self, tokens: list[int]) -> Tensor:
        """Logits [L, V] after each token."""

    def is_greedy(self, prompt: list[int], answer: list[int]) -> bool:
        """Whether every token of `answer` is the most probable one."""
        return self.logits(prompt + answer)[len(prompt) - 1 : -1].argmax(-1).tolist() == answer

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]
