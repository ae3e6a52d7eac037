"""Rows that are drafted at once, at toy size, and the paths that drafts take.

`tests/e2e/test_matrix.py` compares replayed drafts with others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support import forks
from tests.support.speculators import Setting, batch, drafted, made_heads, speculator

SCHEDULE = [(1, 2, 4), (3, 12, 1), (13, 13, 0)]
BATCH, VOCAB, DRAFTS = 24, 96, 4
HEADS: dict[str, dict[str, Any]] = {
    "linear": {},
    "linear, tokens": {"leaves": {"token_rank": 4}},
    "shared": {"leaves": {"kind": "lm_head"}},
    "shared, cp": {"leaves": {"kind": "lm_head"}, "circuit": "cp"},
    "low rank": {"leaves": {"kind": "lm_head", "component_rank": 4}},
    "low rank, tokens": {"leaves": {"kind": "lm_head", "component_rank": 4, "token_rank": 5}},
    "many components": {"leaves": {"kind": "lm_head"}, "num_components": 128},
    "few ids, tokens": {"ids": list(range(1, 96, 2)), "leaves": {"token_rank": 4}},
    "few ids, low rank": {"ids": list(range(0, 96, 3)), "leaves": {"kind": "lm_head", "component_rank": 4}},
    "mlp": {"trunk": {"kind": "mlp"}},
    "mlp, low rank": {"trunk": {"kind": "mlp"}, "leaves": {"kind": "lm_head", "component_rank": 4}},
}
CASES = {
    "off": ("off", 1 << 30),
    "scheduled": (SCHEDULE, 1 << 30),
    "in chunks": ("off", 1 << 16),
    "one row is too large": (SCHEDULE, 1),
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return made_heads(tmp_path_factory.mktemp("memory"), VOCAB, HEADS)


def profile_all(settings: dict[str, Setting]) -> dict[str, Any]:
    """In a fork: (rows, drafts) of every product of the profile run, by setting."""
    found = {}
    for name, setting in settings.items():
        with speculator(setting) as made, mock.patch.object(made.model, "draft_params", wraps=made.model.draft_params):
            made.propose(**batch(made, BATCH), dummy_run=True, is_profile=True)
            found[name] = [(len(call.args[0]), call.args[2]) for call in made.model.draft_params.call_args_list]
    return found


@pytest.fixture(scope="module")
def found(places: dict[str, Path]) -> dict[str, Any]:
    settings = {
        f"{name}, {case}": Setting(place, BATCH, schedule, logits_bytes=size)
        for name, place in places.items()
        for case, (schedule, size) in CASES.items()
    }
    return forks.call("v2", "tests.proposers.test_draft_memory:profile_all", settings)


def test_profile_run_drafts_one_chunk_for_the_largest_batch(found: dict[str, Any]) -> None:
    """Without a number of drafts, as in vLLM's dummy runs."""
    for name in HEADS:
        of_case = {case: found[f"{name}, {case}"] for case in CASES}
        assert of_case["off"] == [(BATCH, DRAFTS)] and of_case["one row is too large"] == [(1, DRAFTS)]
        assert of_case["scheduled"] == [(12, 1)]  # 12 requests of two positions are more than 2 of five
        ((rows, drafts),) = of_case["in chunks"]
        r = HEADS[name].get("num_components", 3)
        has_base = "component_rank" in HEADS[name].get("leaves", {})
        has_first = "trunk" not in HEADS[name]  # without x_1 in its states
        # logits of a row, those of x_1 in float32, and the common part of all components
        columns = len(HEADS[name].get("ids", range(VOCAB)))
        row_bytes = 4 * columns * (r * 2 * has_first + r * drafts + has_base * (has_first + drafts))
        assert drafts == DRAFTS and rows == max(1, (1 << 16) // row_bytes) < BATCH


def draft_on_every_path(places: dict[str, Path]) -> dict[tuple[str, str], list[Any]]:
    """In a fork, by head and path: tokens, confidences and conditionals of a full batch."""
    drafts = {}
    for name, place in places.items():
        for path, size in (("one chunk", 1 << 30), ("chunks", 1 << 16), ("blocks", 1 << 30)):
            with speculator(Setting(place, BATCH, logits_bytes=size)) as made:
                if path == "blocks":  # as of large vocabularies
                    made.drafter.one_launch = False
                drafts[name, path] = drafted(made, BATCH, DRAFTS)
    return drafts


def test_kernel_drafts_the_same_in_chunks_and_blocks(places: dict[str, Path]) -> None:
    names = ["shared", "linear, tokens", "low rank", "low rank, tokens", "many components", "mlp, low rank"]
    names += ["few ids, tokens", "few ids, low rank"]
    given = {name: places[name] for name in names}
    drafts = forks.call("v2", "tests.proposers.test_draft_memory:draft_on_every_path", given)
    for name, path in drafts:
        (tokens, *numbers), (same_tokens, *same_numbers) = drafts[name, "one chunk"], drafts[name, path]
        assert torch.equal(tokens, same_tokens) and len(tokens.unique()) > 4, (name, path)
        for ours, theirs in zip(numbers, same_numbers, strict=True):
            # float32 sums in another order, which processors choose apart: eight units in the last place of a logit
            torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-6)
