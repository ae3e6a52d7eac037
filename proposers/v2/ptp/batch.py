"""The requests of a step as PTP's drafts read them: where they stand, and the random numbers of their rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_mtpc.proposers.v2.coupled import u_of


@dataclass
class RowBatch:
    """R requests; S are the slots of vLLM's states. What sampling tells (None: it is still to come) is for drafts."""

    input_batch: InputBatch
    temperature: Tensor  # [S]
    seeds: Tensor  # [S]
    num_sampled: Tensor | None = None  # [R], 0: the prompt is not read to its end
    num_rejected: Tensor | None = None  # [R]
    last_sampled: Tensor | None = None  # [S, 1]
    next_prefill_tokens: Tensor | None = None  # [lookahead, S]

    @cached_property
    def num_reqs(self) -> int:
        return self.input_batch.num_reqs

    @cached_property
    def slots(self) -> Tensor:
        """[R]"""
        return self.input_batch.idx_mapping[: self.num_reqs]

    @cached_property
    def prefix(self) -> Tensor:
        """Committed tokens [R] of each request, x_1 not among them."""
        ends = self.input_batch.query_start_loc[1 : self.num_reqs + 1]
        return self.input_batch.positions[(ends - self.num_rejected[: self.num_reqs] - 1).long()] + 1

    @cached_property
    def first(self) -> Tensor:
        """x_1 [R]; of requests whose prompt is not read to its end, the next token of it."""
        is_sampled = self.num_sampled[: self.num_reqs] > 0
        return torch.where(is_sampled, self.last_sampled[self.slots, 0], self.next_prefill_tokens[0, self.slots].long())

    @cached_property
    def is_greedy(self) -> Tensor:
        """[R]"""
        return self.temperature[self.slots] == 0

    def u(self, keys: Tensor) -> Tensor:
        """u [R, A] of the tokens that follow positions keys[R, A]."""
        requests = self.slots[:, None].expand_as(keys).flatten()
        return u_of(self.seeds, self.temperature, requests, keys.flatten()).view_as(keys)
