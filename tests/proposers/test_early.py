"""Drafts of a request that may not end yet: for as many as are kept, vLLM forbids the end at the right positions."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate
from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor

from vllm_mtpc.proposers.v1.proposer import drafts_before_min_tokens

VOCAB, STOP, MIN = 4, 2, 3


def processor(tokens: list[int]) -> MinTokensLogitsProcessor:
    """Return vLLM's processor of a request with these tokens; it holds the list."""
    made = MinTokensLogitsProcessor(None, torch.device("cpu"), False)
    params = SamplingParams(min_tokens=MIN, stop_token_ids=[STOP])
    made.update_state(BatchUpdate(1, removed=[], added=[(0, params, [], tokens)], moved=[]))
    return made


def forbidden(said: int, drafts: int) -> list[bool]:
    """Whether STOP is forbidden at each drafted position and after the last, `said` tokens into a text."""
    made = processor([0] * said)
    verified = made.apply_with_spec_decode(torch.zeros(drafts, VOCAB), [drafts])
    last = made.apply(torch.zeros(1, VOCAB))
    return torch.cat([verified, last])[:, STOP].isneginf().tolist()


def kept(said: int, planned: int = 3) -> int:
    made = processor(tokens := [])
    tokens += [0] * said  # as the runner's own list
    return min(planned, drafts_before_min_tokens(SimpleNamespace(non_argmax_invariant=[made])).get(0, planned))


@pytest.mark.parametrize("said", range(MIN + 2))
def test_a_step_forbids_the_end_where_it_is_too_early(said: int) -> None:
    drafts = kept(said)
    assert forbidden(said, drafts) == [said + at < MIN for at in range(drafts + 1)]


def test_more_drafts_would_be_wrong() -> None:
    """The vLLM bug that drafts avoid; where this fails, vLLM has fixed it and early.py can be removed."""
    assert forbidden(1, 3) != [1 + at < MIN for at in range(4)]
