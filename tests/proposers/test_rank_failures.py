"""A head that fails on one of two tensor-parallel ranks is given up on both, and neither waits for the other.

Two processes over gloo, Model Runner V2's speculator, a shared head whose logits are divided: loading it runs
collectives.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from tests.support import forks, speculators, tp_ranks
from tests.support.speculators import Setting, drafted, made_heads, speculator
from tests.support.tp_ranks import VOCAB, Target

TIMEOUT_S = 120.0  # of a rank; it takes some seconds on a busy core


def on_two_ranks(place: Path, store: Path) -> list[Any]:
    return tp_ranks.on_ranks(2, place, store, TIMEOUT_S, failing_on_rank_1, place)


def failing_on_rank_1(rank: int, place: Path) -> dict[str, Any]:
    """What each failure ends with, and whether the same drafts are made after all of them."""
    from vllm_mtpc.proposers.heads import load, swap
    from vllm_mtpc.proposers.heads import ranks as agreement

    def raising(*args: Any) -> Any:
        raise MemoryError("no room\n  for it")

    def outcome(call: Any, *args: Any) -> str:
        try:
            call(*args)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    def serve() -> Any:
        with speculator(Setting(place, 4)) as made:
            return made

    with mock.patch.object(speculators, "Target", Target), ExitStack() as stack:
        failing = mock.patch.object(load, "load_head", raising) if rank else ExitStack()
        warnings: list[str] = []
        with failing, mock.patch.object(agreement, "warn", lambda folder, error: warnings.append(str(error))):
            found = {"bundled": outcome(agreement.attempt, serve, "head"), "named": outcome(serve)}
        found["warned"] = warnings
        made = stack.enter_context(speculator(Setting(place, 4)))
        config = SimpleNamespace(speculative_config=made.speculative_config, use_v2_model_runner=True)
        runner = SimpleNamespace(vllm_config=config, speculator=made, model=Target(VOCAB, made.hidden_size))
        before = drafted(made, 3, 4)
        head = str(place / "head")
        found["swap, missing"] = outcome(swap.swap, runner, str(place / "none") if rank else head)
        with failing:
            found["swap, failing"] = outcome(swap.swap, runner, head)
        same = [left.equal(right) for left, right in zip(before, drafted(made, 3, 4), strict=True)]
        return found | {"same drafts": all(same), "swap": outcome(swap.swap, runner, head)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    place = made_heads(folder, VOCAB, {"one": {"head": "shared", "num_components": 32, "window": 5}})["one"]
    return forks.call("v2", f"{__name__}:on_two_ranks", place, folder / "store", timeout=2 * TIMEOUT_S)


def test_failed_load_returns_on_both_ranks(ranks: list[dict[str, Any]]) -> None:
    elsewhere = "on rank 1: no room for it"
    assert [rank["bundled"] for rank in ranks] == ["GivenUp: "] * 2
    assert [rank["warned"] for rank in ranks] == [[elsewhere], []]  # once, by the first rank
    assert ranks[0]["named"] == f"RuntimeError: {elsewhere}"
    assert ranks[1]["named"] == "MemoryError: no room\n  for it"


@pytest.mark.parametrize(("case", "reason"), [("missing", "none: the folder does not exist"), ("failing", "no room")])
def test_failed_swap_is_refused_on_both_ranks(case: str, reason: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank[f"swap, {case}"].startswith("ServeConfigError: the head is not swapped")
        assert reason in rank[f"swap, {case}"]


def test_ranks_draft_on_after_refused_swaps(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["same drafts"] and rank["swap"] == "no error"
