"""What a request may ask of its drafts."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from vllm_mtpc.proposers.config import request


@pytest.mark.parametrize(("extra", "drafts"), [(None, 7), ({}, 7), ({"mtpc_drafts": 3}, 3), ({"mtpc_drafts": 0}, 0)])
def test_drafts_of_a_request(extra: dict[str, Any] | None, drafts: int) -> None:
    request.check(extra, 7)
    assert request.drafts_of(SamplingParams(extra_args=extra), 7) == drafts


def test_drafts_of_a_pooling_request() -> None:
    assert request.drafts_of(None, 7) == 7


@pytest.mark.parametrize("value", [-1, 8, 2.5, "3", True, [1]])
def test_bad_numbers_are_refused(value: Any) -> None:
    with pytest.raises(VLLMValidationError, match=r"mtpc_drafts=.*allowed are whole numbers from 0 .* to 7") as caught:
        request.check({"mtpc_drafts": value}, 7)
    assert "\n" not in str(caught.value)


def test_a_misspelt_name_is_refused_and_others_are_not_ours() -> None:
    with pytest.raises(VLLMValidationError, match=r"'mtpc_draft' is not known; .* did you mean mtpc_drafts\?"):
        request.check({"mtpc_draft": 1}, 7)
    request.check({"session_id": "a"}, 7)
