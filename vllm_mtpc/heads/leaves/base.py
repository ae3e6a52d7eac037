"""The contract of leaves, and what they share: the term of the token before (`kernels/leaf.py`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from vllm_mtpc.circuits.base import Circuit
from vllm_mtpc.heads.sections import Section
from vllm_mtpc.kernels.leaf import Bigram, LowRank, evidence_of

INIT_STD = 0.01
TOKEN_STD = 0.1  # of token_source: rows must differ for token_target, which starts at 0, to learn anything


class LeavesOptions(Section):
    """The options of all leaves."""

    token_rank: int = Field(ge=0, le=4096, description="rank of the term that the token before adds (default: 0)")


class Leaves(nn.Module, ABC):
    """Computes leaves from the states of a trunk. `Options` is its section of `config.json`.

    Parameters of all leaves: token_source [V, R] and token_target [n - 1, R, columns], positions 2 to n, where
    R = token_rank is not 0. Positions are those of the window, from 0 for x_1 on; the first `skip` of them, 1
    if the trunk has seen x_1, else 0, have no leaf. A leaf has `columns` tokens, V or those of the draft vocabulary.
    """

    Options: ClassVar[type[LeavesOptions]]
    needs_lm_head: ClassVar[bool] = False  # True: `bind_lm_head` before it is used
    component_dims: ClassVar[dict[str, tuple[int, ...]]]  # dimensions of a parameter that run over components
    noise_in: str  # the parameter whose noise makes equal components differ
    component_rank: int = 0  # R_c of components by low-rank differences; 0: each component has its own leaves

    def __init__(
        self, options: Any, circuit: Circuit, skip: int, columns: int, vocab_size: int, hidden_size: int
    ) -> None:
        super().__init__()
        self.options, self.skip, self.columns, self.hidden_size = options, skip, columns, hidden_size
        self.window, self.num_components, self.token_rank = circuit.window, circuit.num_components, options.token_rank
        self.num_leaves = circuit.window - skip
        if self.token_rank:
            self.token_source = nn.Parameter(torch.empty(vocab_size, self.token_rank))
            self.token_target = nn.Parameter(torch.empty(circuit.window - 1, self.token_rank, columns))

    @abstractmethod
    def base(self, states: Tensor, start: int, stop: int) -> tuple[Tensor, LowRank | None]:
        """Return the logits [B, k, r, columns] of positions start .. stop - 1, or [B, k, 1, columns] and differences.

        states: [B, 1, D] for all positions, or [B, n - skip, D]; start: `skip` or more.
        """

    def forward(self, states: Tensor, start: int, stop: int) -> Tensor:
        """Return the logits [B, k, r, columns] of positions start .. stop - 1; arguments as in `base`."""
        base, low = self.base(states, start, stop)
        return base if low is None else low.leaves(base)

    def draft(self, states: Tensor, first: Tensor, stop: int) -> tuple[Tensor | None, Tensor, LowRank | None]:
        """Return evidence of x_1, leaf and low of `DraftParams` for positions 1 .. stop - 1 = K, x_1 not seen.

        states: [B, 1, D]; first: [B] int64, the column of x_1.
        """
        logits = self(states, 0, stop)
        return evidence_of(logits[:, 0], first), logits[:, 1:], None

    def bigram(self, num_positions: int | None = None) -> Bigram | None:
        """Return the bigram of `num_positions` positions from the second on (None: all); None with token_rank 0."""
        return Bigram(self.token_source, self.token_target[:num_positions]) if self.token_rank else None

    def rows_of(self, states: Tensor, start: int, stop: int) -> Tensor:
        """Return the states of positions start .. stop - 1: [B, 1, D], or one for each."""
        return states if states.shape[1] == 1 else states[:, start - self.skip : stop - self.skip]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise from torch's own generator; a bigram adds 0."""
        if self.token_rank:
            self.token_source.normal_().mul_(TOKEN_STD)
            self.token_target.zero_()
