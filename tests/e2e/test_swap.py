"""Heads that are swapped while an engine serves: the text stays plain vLLM's, and heads that do not fit are refused.

`tests/operate/test_head_endpoint.py` swaps under requests, `test_distribution.py` before every step.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import Call, Reply, ask, build, run_with_plain
from tests.support.models import make_head, make_ptp_head, make_target
from tests.support.requests import COLUMNS

PROMPTS = [[3, 9, 4], [20, 21, 22, 23, 24], [7, 7, 1, 12]]
OPTIONS = {"mtpc": {}, "ptp": {"method": "ptp", "max_aux_rows": 32}}
REFUSED = {  # by method: heads that do not fit, and a part of the message
    "mtpc": {
        "short": "with window=3 of head",
        "of another vocabulary": "has vocab_size=40, target",
        "ptp": "is of method 'ptp', not 'mtpc'",
        "nowhere": "nowhere",
        "cut off": "cut off",
    },
    "ptp": {"of another rank": "it has lora_rank=2, the served head 4", "mtpc": "is of method 'mtpc', not 'ptp'"},
}
GREEDY, DRAWN = ask(PROMPTS, 24), ask(PROMPTS, 24, temperature=1.0, seed=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("swap")
    target = make_target(folder / "target", 48, seed=3)
    make_head(folder / "mtpc", target, "btree", 4, 2)
    make_head(folder / "mtpc-other", target, "hmm", 5, 3)
    make_head(folder / "mtpc-same", target, "btree", 4, 2, is_bad=True)
    make_head(folder / "short", target, "hmm", 3, 2)
    make_head(folder / "of another vocabulary", make_target(folder / "other target", 40, seed=3), "hmm", 4, 2)
    make_ptp_head(folder / "ptp", target, "o-ptp", 4, scale=0.01)
    make_ptp_head(folder / "ptp-other", target, "o-ptp", 4, scale=0.3)
    make_ptp_head(folder / "of another rank", target, "o-ptp", 4, scale=0.01, rank=2)
    make_head(folder / "cut off", target, "hmm", 4, 2)
    weights = folder / "cut off" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return folder


def answers(
    folder: Path, runner: str, head: str, ours: dict[str, Call], injected: str | None = None
) -> tuple[dict[str, Reply], list[Reply]]:
    """Replies of an engine with the head by call, and of plain vLLM to GREEDY and DRAWN."""
    spec = {**OPTIONS[head], "num_speculative_tokens_per_batch_size": "off"}
    engine = build(folder, head, list(ours.values()), injected, spec)
    made, plain = run_with_plain(engine, runner, [GREEDY, DRAWN])
    return dict(zip(ours, made, strict=True)), plain


@pytest.fixture(scope="module")
def served(folder: Path) -> Any:
    def of(runner: str, head: str) -> tuple[dict[str, Reply], list[Reply]]:
        other = str(folder / f"{head}-other")
        calls = {"greedy": GREEDY, "drawn": DRAWN, "greedy, swapped": replace(GREEDY, swap=other)}
        calls |= {"drawn, swapped": DRAWN, "swapped back": replace(GREEDY, swap=str(folder / head))}
        for name in REFUSED[head]:
            calls[name] = replace(GREEDY, is_refused=True, swap=str(folder / name))
        return answers(folder, runner, head, calls | {"at last": GREEDY})

    return cache(of)


@pytest.mark.parametrize(("runner", "head"), COLUMNS)
def test_swapped_head_drafts_and_the_text_does_not_change(served: Any, folder: Path, runner: str, head: str) -> None:
    ours, (greedy, drawn) = served(runner, head)
    for name in ("greedy", "greedy, swapped", "swapped back", "at last"):
        assert ours[name].tokens == greedy.tokens, name
    for name in ("drawn", "drawn, swapped"):  # PTP's seeded text is its own, whatever is drafted
        assert ours[name].tokens == (ours["drawn"] if head == "ptp" else drawn).tokens, name
    first, one, back = (ours[name] for name in ("greedy", "greedy, swapped", "swapped back"))
    assert ours["at last"].accepted > back.accepted > first.accepted > 0
    assert first.recorded == [] and one.recorded[0]["head"] == str(folder / f"{head}-other")
    assert back.recorded[0]["head"] == str(folder / head)
    assert first.accepted / first.steps != one.accepted / one.steps


@pytest.mark.parametrize(("runner", "head"), COLUMNS)
def test_head_that_does_not_fit_is_refused(served: Any, runner: str, head: str) -> None:
    ours, _ = served(runner, head)
    for name, message in REFUSED[head].items():
        error = ours[name].error
        assert "the head is not swapped" in error and "drafts on: " in error, name
        assert message in error and "\n" not in error, (name, error)


def test_heads_of_equal_shape_are_swapped_where_graphs_hold_their_addresses(folder: Path) -> None:
    """As on a GPU: the weights of the new head draft, a head of another shape is refused."""
    same, other = (str(folder / name) for name in ("mtpc-same", "mtpc-other"))
    calls = {"first": GREEDY, "swapped": replace(GREEDY, swap=same)}
    calls["refused"] = replace(GREEDY, is_refused=True, swap=other)
    ours, (plain, _) = answers(folder, "v2", "mtpc", calls, "keeps_shapes")
    first, swapped, refused = ours.values()
    assert first.tokens == swapped.tokens == plain.tokens
    found, *steps = swapped.recorded
    assert found["head"] == same
    assert any(step["replayed"] for step in steps) and all(step["same"] for step in steps), "graphs have old weights"
    # a head that drafts the least probable tokens: none of its drafts is kept
    assert swapped.accepted - first.accepted < first.accepted / 4
    assert "for which memory and CUDA graphs were made; allowed are heads of equal shape" in refused.error
    assert "it has window=5, the served head 4" in refused.error and "\n" not in refused.error
