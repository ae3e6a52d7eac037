"""Drafts masked with a grammar on Model Runner V2 (`heads/grammar.py`).

The batch is drafted for as ever, in one launch; then the host reads what structured requests have emitted, and drafts
for them once more, one draft after the other, each masked and drawn from the same noise. `draft_logits` get the masked
conditionals. The wait costs little next to vLLM's own: with asynchronous scheduling it samples a structured step once
the host has the tokens of the step before.

Drafts that are not masked (`mask_drafts: false`, a reasoning parser) are verified so that the output keeps its
distribution: `verification.py`. With synchronous scheduling vLLM does not schedule forbidden drafts at all, which is
the same bias; `patches/scheduler.py` keeps the first one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.structured_output.request import StructuredOutputRequest
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.states import RequestState

from vllm_mtpc.proposers.heads.grammar import Grammars, Masks


@dataclass
class Structured:
    """A structured request, and what the host has read of its output."""

    sampling_params: SamplingParams
    prompt_len: int
    output_token_ids: list[int]


class StructuredRequests:
    """The structured requests of a worker: which rows of a batch they have, and what their drafts may be."""

    def __init__(self, vllm_config: VllmConfig, states: RequestState) -> None:
        self.grammars = Grammars(vllm_config, is_masking=True)
        self.states = states
        self.requests: dict[str, Structured] = {}

    def add(self, scheduled_new_reqs: list[Any]) -> None:
        """Once vLLM's states have these requests; one that was preempted comes back with the output it has kept."""
        self.requests = {name: kept for name, kept in self.requests.items() if name in self.states.req_id_to_index}
        for new in scheduled_new_reqs:
            self.requests.pop(new.req_id, None)
            self.grammars.start(new.req_id, new.sampling_params)
            if StructuredOutputRequest.from_sampling_params(new.sampling_params) is not None:
                output = new.prefill_token_ids[new.prompt_len :]
                self.requests[new.req_id] = Structured(new.sampling_params, new.prompt_len, output)

    def rows(self, input_batch: InputBatch) -> list[int]:
        """The rows of structured requests; none, and nothing is waited for, where there is no such request."""
        if not self.requests:
            return []
        return [row for row, name in enumerate(input_batch.req_ids) if name in self.requests]

    def masks(self, names: list[str], slots: Tensor, num_sampled: Tensor) -> Masks:
        """Masks of a batch of some structured requests; waits for the device.

        slots [S] in vLLM's states; num_sampled [S], 0: the prompt is not read to its end.
        """
        lengths = self.states.total_len.gpu[slots]
        counts = torch.stack([lengths, num_sampled.to(lengths.dtype)], dim=1).tolist()
        asked = [self.requests[name] for name in names]
        unread = [
            length - one.prompt_len - len(one.output_token_ids) for one, (length, _) in zip(asked, counts, strict=True)
        ]
        if (most := max(unread)) > 0:
            last = lengths[:, None] - torch.arange(most, 0, -1, device=lengths.device)
            tokens = self.states.all_token_ids.gpu[slots[:, None], last.clamp(min=0).long()].tolist()
            for one, count, read in zip(asked, unread, tokens, strict=True):
                one.output_token_ids += read[most - count :] if count else []
        return self.grammars.masks(self.requests, names, [[0] * sampled for _, sampled in counts])
