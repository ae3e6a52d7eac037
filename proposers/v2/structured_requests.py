"""Requests with a grammar on Model Runner V2, and the masks of their drafts (`proposers/heads/grammar_masks.py`).

The whole batch is drafted first, in one launch. Then the host reads the tokens that structured requests have emitted,
and `MtpcSpeculator._generate_masked_draft` drafts for them again, each draft masked and sampled with the same noise;
`draft_logits` receive the masked conditionals. Drafts that are not masked are verified as `verification.py` describes.
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

from vllm_mtpc.proposers.heads.grammar_masks import Grammars, Masks


@dataclass
class Structured:
    sampling_params: SamplingParams
    prompt_len: int
    output_token_ids: list[int]  # that the host has read


class StructuredRequests:
    """The structured requests of a worker."""

    def __init__(self, vllm_config: VllmConfig, states: RequestState) -> None:
        self.grammars = Grammars(vllm_config, is_masking=True)
        self.states = states
        self.requests: dict[str, Structured] = {}

    def add(self, scheduled_new_reqs: list[Any]) -> None:
        """Register new requests that vLLM's states hold; a preempted one returns with the output that it has kept."""
        self.requests = {name: kept for name, kept in self.requests.items() if name in self.states.req_id_to_index}
        for new in scheduled_new_reqs:
            self.requests.pop(new.req_id, None)
            self.grammars.start(new.req_id, new.sampling_params)
            if StructuredOutputRequest.from_sampling_params(new.sampling_params) is not None:
                output = new.prefill_token_ids[new.prompt_len :]
                self.requests[new.req_id] = Structured(new.sampling_params, new.prompt_len, output)

    def rows(self, input_batch: InputBatch) -> list[int]:
        return [row for row, name in enumerate(input_batch.req_ids) if name in self.requests] if self.requests else []

    def masks(self, req_ids: list[str], slots: Tensor, num_sampled: Tensor) -> Masks:
        """Return the masks of S structured requests in slots [S] with num_sampled [S] tokens; waits for the device."""
        lengths = self.states.total_len.gpu[slots]
        counts = torch.stack([lengths, num_sampled.to(lengths.dtype)], dim=1).tolist()
        requests = [self.requests[name] for name in req_ids]
        unread = [
            length - request.prompt_len - len(request.output_token_ids)
            for request, (length, _) in zip(requests, counts, strict=True)
        ]
        if (width := max(unread)) > 0:
            last = lengths[:, None] - torch.arange(width, 0, -1, device=lengths.device)
            tokens = self.states.all_token_ids.gpu[slots[:, None], last.clamp(min=0).long()].tolist()
            for request, count, row in zip(requests, unread, tokens, strict=True):
                request.output_token_ids += row[width - count :] if count else []
        return self.grammars.masks(self.requests, req_ids, [[0] * sampled for _, sampled in counts])
