"""Drafts beyond the schedule for requests with a seed, and for them alone, on Model Runner V2.

Text of a request with a seed must not depend on how many others run, so it is drafted for in full where the schedule
gives its batch less (seam/scheduler.py asks for that). vLLM asks a speculator for one number of drafts for the whole
batch; here the batch is drafted for as scheduled, and rows with a seed once more in full, a few at a time: as many as
the schedule ever drafts for in full, which is what memory was measured with and what graphs exist for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_mtpc.proposers.v2.speculator import MtpcSpeculator


def draft_apart(runner: Any) -> None:
    """Have the speculator of a runner draft as scheduled for rows without a seed."""
    spec, speculator = runner.speculative_config, runner.speculator
    most, ranges = spec.num_speculative_tokens, spec.num_speculative_tokens_per_batch_size
    if spec.method != "mtpc" or not ranges:  # PTP's text does not depend on its drafts
        return
    table = build_dynamic_sd_schedule_lookup(ranges, runner.max_num_reqs, most)
    at_once = max((batch for batch, drafts in enumerate(table) if batch and drafts == most), default=1)
    propose, states_of = speculator.propose, _noted_states(speculator)

    def apart(
        input_batch: InputBatch,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Tensor,
        aux_hidden_states: Any,
        num_sampled: Tensor,
        num_rejected: Tensor,
        *given: Any,
        dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        asked = most if num_speculative_tokens is None else num_speculative_tokens
        usual = asked if dummy_run else min(asked, table[input_batch.num_reqs])
        batch = (attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, num_sampled, num_rejected, *given)
        if usual == asked:
            kwargs |= {"dummy_run": dummy_run, "num_speculative_tokens": num_speculative_tokens}
            return propose(input_batch, *batch, **kwargs)
        drafts = propose(input_batch, *batch, num_speculative_tokens=usual, **kwargs).clone()
        confidences = speculator.draft_token_confidence_probs
        kept = confidences.clone()
        seeded = seeded_rows(runner.sampler.sampling_states, input_batch)
        for start in range(0, len(seeded), at_once):
            some = seeded[start : start + at_once]
            rows = torch.from_numpy(some).to(drafts.device, non_blocking=True)
            states = states_of(last_hidden_states)
            part = (attn_metadata, slot_mappings, states, None, num_sampled[rows], num_rejected[rows])
            few = _only(input_batch, some, rows)
            drafts[rows] = MtpcSpeculator.propose(
                speculator, few, *part, *given, num_speculative_tokens=asked, **kwargs
            )
            kept[rows] = confidences[: len(some)]
        confidences.copy_(kept)
        speculator.clock.cuts.schedule += (asked - usual) * (input_batch.num_reqs - len(seeded))
        return drafts

    speculator.propose = apart


def seeded_rows(sampling_states: Any, input_batch: InputBatch) -> np.ndarray:
    """Rows of a batch, int64, whose requests asked for text that can be had again (seam/scheduler.py: is_seeded)."""
    slots = input_batch.idx_mapping_np[: input_batch.num_reqs]
    return np.flatnonzero(sampling_states.seeds_set[slots] & (sampling_states.temperature.np[slots] > 0))


def _only(input_batch: InputBatch, some: np.ndarray, rows: Tensor) -> InputBatch:
    """A batch of some requests of a batch, whose tokens stay where they are."""
    ends = input_batch.query_start_loc[1:][rows]
    return replace(
        input_batch,
        req_ids=[input_batch.req_ids[row] for row in some],
        num_reqs=len(some),
        num_reqs_after_padding=len(some),
        idx_mapping=input_batch.idx_mapping[rows],
        idx_mapping_np=input_batch.idx_mapping_np[some],
        query_start_loc=torch.cat([ends.new_zeros(1), ends]),
    )


def _noted_states(speculator: Any) -> Any:
    """What gives the states that the head reads: the target's, or what left the draft layers in the last pass."""
    if not hasattr(speculator, "_states"):
        return lambda states: states
    given, noted = speculator._states, []

    def through_the_layers(*args: Any, **kwargs: Any) -> Tensor:
        noted[:] = [given(*args, **kwargs)]
        return noted[0]

    speculator._states = through_the_layers
    return lambda states: noted[0]
