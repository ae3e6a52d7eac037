"""What a request may ask of its drafts."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from vllm_mtpc.proposers.config import request_options as request


@pytest.mark.parametrize(
    ("given", "drafts"),
    [
        ({}, 7),
        ({"extra_args": {}}, 7),
        ({"extra_args": {"mtpc_drafts": 3}}, 3),
        ({"extra_args": {"mtpc_drafts": 0}}, 0),
        ({"min_p": 0.1}, 0),  # vLLM verifies no drafts with these two
        ({"logit_bias": {5: 1.0}}, 0),
    ],
)
def test_drafts_of_a_request(given: dict[str, Any], drafts: int) -> None:
    request.check_request(SamplingParams(**given), 7)
    assert request.max_drafts(SamplingParams(**given), 7) == drafts
    assert request.max_drafts(None, 7) == 7  # a pooling request


@pytest.mark.parametrize(
    "given",
    [{"extra_args": {"mtpc_drafts": 1}}, {"min_p": 0.1}, {"logit_bias": {5: 1.0}}, {"logprob_token_ids": [1]}],
)
def test_an_operator_refuses_requests_with_drafts_of_their_own(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    request.check_request(SamplingParams(**given), 7)
    monkeypatch.setenv("MTPC_REQUEST_DRAFTS", "0")
    with pytest.raises(VLLMValidationError, match=r"MTPC_REQUEST_DRAFTS=0.*remove it"):
        request.check_request(SamplingParams(**given), 7)
    request.check_request(SamplingParams(temperature=0.5, logprobs=3), 7)


def test_seeds_beyond_64_bits_are_refused() -> None:
    """Sample i of n has seed + i; a number that is too large ends Model Runner V2."""
    request.check_request(SamplingParams(seed=2**63 - 2, n=2), 7)
    with pytest.raises(VLLMValidationError, match=rf"n=2.*allowed are seeds up to {2**63 - 2}; lower the seed"):
        request.check_request(SamplingParams(seed=2**63 - 1, n=2), 7)


@pytest.mark.parametrize("value", [-1, 8, 2.5, "3", True, [1]])
def test_bad_numbers_are_refused(value: Any) -> None:
    with pytest.raises(VLLMValidationError, match=r"mtpc_drafts=.*allowed are whole numbers from 0 .* to 7") as caught:
        request.check_request(SamplingParams(extra_args={"mtpc_drafts": value}), 7)
    assert "\n" not in str(caught.value)


def test_a_misspelt_name_is_refused_and_others_are_not_ours() -> None:
    with pytest.raises(VLLMValidationError, match=r"'mtpc_draft' is not known; allowed: 'mtpc_drafts'; remove it"):
        request.check_request(SamplingParams(extra_args={"mtpc_draft": 1}), 7)
    request.check_request(SamplingParams(extra_args={"session_id": "a"}), 7)
