"""V2's speculator drafts by the kernel what it drafts by the definition, of heads with every option of a leaf."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import forks
from tests.support.speculators import Setting, drafted, made_heads, speculator

VOCAB, BATCH, DRAFTS = 96, 6, 4
LOW_RANK = {"head": "shared", "component_rank": 4}
HEADS: dict[str, dict[str, Any]] = {
    "tokens": {"token_rank": 5},
    "low rank": LOW_RANK,
    "low rank and tokens": {**LOW_RANK, "token_rank": 5},
}


def by_both(settings: dict[str, Setting]) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    """In a fork, by head: tokens, confidences and conditionals of the kernel, and of the definition."""
    found = {}
    for name, setting in settings.items():
        with speculator(setting) as made:
            assert made.drafter is not None
            kernels = drafted(made, BATCH, DRAFTS)
            made.drafter = None
            found[name] = kernels, drafted(made, BATCH, DRAFTS)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[Tensor], list[Tensor]]]:
    places: dict[str, Path] = made_heads(tmp_path_factory.mktemp("by kernel"), VOCAB, HEADS)
    settings = {name: Setting(place, BATCH + 2) for name, place in places.items()}
    return forks.call("v2", "tests.proposers.test_drafts_by_kernel:by_both", settings)


@pytest.mark.parametrize("name", list(HEADS))
def test_the_kernel_drafts_what_the_definition_drafts(
    name: str, found: dict[str, tuple[list[Tensor], list[Tensor]]]
) -> None:
    (tokens, *numbers), (same_tokens, *same_numbers) = found[name]
    assert torch.equal(tokens, same_tokens)
    assert len(tokens.unique()) > 4
    for ours, theirs in zip(numbers, same_numbers, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)  # float32 sums in another order
    distribution = numbers[1][-BATCH:, :DRAFTS]
    inside = (distribution > -torch.inf).sum(dim=-1)
    assert (inside == VOCAB).all()
