"""A shared head whose logits are divided over two ranks: drafts as on one rank, with an r-th of the communication.

Model Runner V2's speculator on vLLM's own layers and groups (gloo); the kernels are interpreted.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.support import forks, speculators, tp_ranks
from tests.support.speculators import Setting, batch, drafted, made_heads, speculator
from tests.support.tp_ranks import KINDS, VOCAB, Target

# 32 components of the vocabulary are no small leaf.
WINDOW, BATCH, DRAFTS = 5, 6, 4
COMPONENTS = {"kernel": 32, "definition": 65, "kernel with tokens": 32, "definition with tokens": 65}
GREEDY = {"draft_sample_method": "greedy"}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    heads = {
        name: {"head": "shared", "num_components": r, "window": WINDOW, "token_rank": 5 * ("tokens" in name)}
        for name, r in COMPONENTS.items()
    }
    return made_heads(tmp_path_factory.mktemp("divided"), VOCAB, heads)


def on_ranks(num_ranks: int, settings: dict[str, tuple[Setting, str]], store: Path) -> list[dict[str, Any]]:
    """In a fork, by rank and case: drafts, confidences, conditionals; sizes of the gathers."""
    return tp_ranks.on_ranks(num_ranks, next(iter(settings.values()))[0].place, store, 1200, _all_drafted, settings)


def _all_drafted(rank: int, settings: dict[str, tuple[Setting, str]]) -> dict[str, Any]:
    return {name: _drafted(*setting) for name, setting in settings.items()}


def _drafted(setting: Setting, kind: str) -> tuple[list[Tensor | None], list[int]]:
    from vllm.distributed.parallel_state import GroupCoordinator

    gather, numbers = GroupCoordinator.all_gather, []

    def counting(group: Any, own: Tensor, dim: int = -1) -> Tensor:
        numbers.append(own.numel())
        return gather(group, own, dim)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Target, "kind", kind))
        stack.enter_context(mock.patch.object(speculators, "Target", Target))
        made = stack.enter_context(speculator(setting))
        stack.enter_context(mock.patch.object(GroupCoordinator, "all_gather", counting))
        if made.draft_logits is not None:
            return drafted(made, BATCH, DRAFTS), numbers
        made.propose(**batch(made, BATCH), num_speculative_tokens=DRAFTS)
        confidences = made.draft_token_confidence_probs[:BATCH, :DRAFTS]
        return [made.draft_tokens[:BATCH, :DRAFTS], confidences, None], numbers


CASES = {
    **{f"{name}, {kind}": (name, None, kind) for name in COMPONENTS if "tokens" not in name for kind in KINDS},
    **{f"{name}, plain": (name, None, "plain") for name in COMPONENTS if "tokens" in name},
    "kernel, argmax": ("kernel", GREEDY, "plain"),
    "kernel, forbids a token": ("kernel", None, "forbids a token"),
    "kernel, bfloat16": ("kernel", {"head_dtype": "bfloat16"}, "plain"),
}


@pytest.fixture(scope="module")
def found(places: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    store = tmp_path_factory.mktemp("store")
    settings = {
        name: (Setting(places[which], BATCH + 2, options=options), kind)
        for name, (which, options, kind) in CASES.items()
    }
    here = "tests.proposers.test_divided_logits:on_ranks"
    return {size: forks.call("v2", here, size, settings, store / str(size)) for size in (1, 2)}


@pytest.mark.parametrize("name", list(CASES))
def test_two_ranks_draft_as_one_rank(name: str, found: dict[int, list[dict[str, Any]]]) -> None:
    tokens, *numbers = found[1][0][name][0]
    ranks = [rank[name][0] for rank in found[2]]
    for mine, theirs in zip(*ranks, strict=True):
        assert mine is theirs is None or torch.equal(mine, theirs), "the ranks differ"
    same_tokens, *same_numbers = ranks[0]
    assert torch.equal(tokens, same_tokens)
    assert len(tokens.unique()) > 4 and (tokens >= 576).any() and (tokens < 576).any(), "tokens of both ranks"
    # float32 sums in another order; a number in bfloat16 may be rounded to its neighbour
    rtol = 2**-7 if name == "kernel, bfloat16" else 0
    for one, other in zip(numbers, same_numbers, strict=True):
        assert one is other is None or torch.testing.assert_close(one, other, atol=2e-5, rtol=rtol) is None


@pytest.mark.parametrize("name", [name for name in CASES if "forbids" not in name])
def test_communication_is_an_rth_of_the_logits(name: str, found: dict[int, list[dict[str, Any]]]) -> None:
    _, numbers = found[2][0][name]
    r, rows = COMPONENTS[name.partition(",")[0]], 576
    distribution = DRAFTS * (0 if "argmax" in name else rows)
    # x_1: two numbers per component. Per draft: a normaliser and the drafted token's evidence per component, and what
    # the candidates are compared by; components are filled up to a power of two, columns to a multiple of 16.
    assert sum(numbers) <= BATCH * (2 * r + DRAFTS * (2 * r + 5) + distribution)
    assert len(numbers) <= 3 + (3 if "tokens" in name else 2) * DRAFTS
    gathered = BATCH * (1 + DRAFTS) * r * rows
    assert sum(numbers) < gathered / (r / 1.3)


def test_logits_that_the_target_changes_are_gathered(found: dict[int, list[dict[str, Any]]]) -> None:
    """A token that the target forbids has no mass in the drafts."""
    for size in (1, 2):
        (_, _, distribution), numbers = found[size][0]["kernel, forbids a token"]
        assert (distribution[-BATCH:, :DRAFTS, VOCAB - 2] == -torch.inf).all()
        assert numbers == ([BATCH * (1 + DRAFTS) * 32 * 576] if size == 2 else [])
