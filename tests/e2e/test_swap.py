"""Heads that are swapped, and requests with a number of drafts of their own: the text stays plain vLLM's."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import Call, Reply, ask, build, run_with_plain
from tests.support.models import make_head, make_ptp_head, make_target
from tests.support.requests import COLUMNS, same_logprobs

PROMPTS = [[3, 9, 4], [20, 21, 22, 23, 24], [7, 7, 1, 12]]
OPTIONS = {"mtpc": {}, "ptp": {"method": "ptp", "max_aux_rows": 32}}
REFUSED = {  # by method: heads that do not fit, and a part of the message
    "mtpc": {
        "short": "has window=3: allowed are 1 to 2",
        "of another vocabulary": "has vocab_size=40, but target",
        "ptp": "is of method 'ptp', not 'mtpc'",
        "nowhere": "nowhere",
        "cut off": "cut off",
    },
    "ptp": {"of another rank": "it has lora_rank=2, the served head 4", "mtpc": "is of method 'mtpc', not 'ptp'"},
}
NO, ONE, FOUR = ({"extra_args": {"mtpc_drafts": number}} for number in (0, 1, 4))
NUMBERS = {"all": [{}, {}, {}], "none": [NO, NO, NO], "one each": [ONE, ONE, ONE], "mixed": [NO, ONE, {}]}  # of drafts
# next to each other: requests that vLLM serves without drafts, and one that has them
WITHOUT: dict[str, list[dict[str, Any]]] = {
    "min_p": [{"min_p": 0.2}, {"min_p": 0.05, "logprobs": 2}, {}],
    "logit_bias": [{"logit_bias": {7: 4.0, 9: -100.0}}, {"logit_bias": {3: 2.0}}, {}],
    "logprob_token_ids": [{"logprob_token_ids": [5, 9, 40], "max_tokens": 6}, {}, {}],
    "logprob_token_ids and logprobs": [{"logprob_token_ids": [5, 9], "max_tokens": 9}, {"logprobs": 3}, {}],
}


def call(is_drawn: bool, *more: dict[str, Any], swap: tuple[str, ...] = ()) -> Call:
    made = ask(PROMPTS, 24, **({"temperature": 1.0, "seed": 5} if is_drawn else {}))
    return Call(PROMPTS, [base | one for base, one in zip(made.sampling, more or [{}] * 3, strict=True)], swap=swap)


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
    folder: Path, runner: str, head: str, ours: dict[str, Call], plain: list[str], injected: str | None = None
) -> tuple[dict[str, Reply], dict[str, Reply]]:
    """Replies of an engine with the head, and of plain vLLM to the calls that are named."""
    spec = {**OPTIONS[head], "num_speculative_tokens_per_batch_size": "off"}
    spec |= {"min_acceptance": 0.0} if runner == "v1" else {}
    engine = build(folder, head, list(ours.values()), injected, spec)
    made, theirs = run_with_plain(engine, runner, [ours[name] for name in plain])
    return dict(zip(ours, made, strict=True)), dict(zip(plain, theirs, strict=True))


KINDS = {"greedy": False, "drawn": True}


@pytest.fixture(scope="module")
def served(folder: Path) -> Any:
    """Replies, drawn after greedy ones: without a swap, with one and with several; refused swaps; the rest."""

    def of(runner: str, head: str) -> tuple[dict[str, Reply], dict[str, Reply]]:
        own, other, calls, compared = str(folder / head), str(folder / f"{head}-other"), {}, list(KINDS)
        for kind, drawn in KINDS.items():
            for how, heads in {"": (), ", swapped": (other,), ", swapping": (own, other)}.items():
                calls[f"{kind}{how}"] = call(drawn, swap=heads)
        for name in REFUSED[head]:
            calls[name] = replace(call(False), is_refused=True, swap=(str(folder / name),))
        calls["greedy, at last"] = call(False)
        for kind, drawn in KINDS.items():
            rows = NUMBERS | (WITHOUT if head == "mtpc" or not drawn else {})  # PTP's seeded text is its own
            calls |= {f"{kind}, {name}": call(drawn, *row) for name, row in rows.items()}
            compared += [f"{kind}, {name}" for name in rows.keys() & WITHOUT]
        calls["too many"] = replace(call(False, FOUR, FOUR, FOUR), is_refused=True)
        return answers(folder, runner, head, calls, compared)

    return cache(of)


@pytest.mark.feature("a head swapped while serving", "exact")
@pytest.mark.parametrize(("runner", "head"), COLUMNS)
def test_swapped_head_drafts_and_the_text_does_not_change(served: Any, folder: Path, runner: str, head: str) -> None:
    ours, plain = served(runner, head)
    for name in ("", ", swapped", ", swapping", ", at last"):
        assert ours[f"greedy{name}"].tokens == plain["greedy"].tokens, name
    for name in ("", ", swapped", ", swapping"):  # PTP's seeded text is its own, whatever is drafted
        assert ours[f"drawn{name}"].tokens == (ours if head == "ptp" else plain)["drawn"].tokens, name
    first, one, several = (ours[f"greedy{name}"] for name in ("", ", swapped", ", swapping"))
    assert ours["greedy, at last"].accepted > several.accepted > first.accepted > 0
    assert first.recorded == [] and one.recorded[0]["head"] == str(folder / f"{head}-other")
    assert len(several.recorded) >= 4
    assert {each["head"] for each in several.recorded} == {str(folder / head), str(folder / f"{head}-other")}
    assert first.accepted / first.steps != one.accepted / one.steps


@pytest.mark.parametrize(("runner", "head"), COLUMNS)
def test_head_that_does_not_fit_is_refused(served: Any, runner: str, head: str) -> None:
    ours, _ = served(runner, head)
    for name, message in REFUSED[head].items():
        error = ours[name].error
        assert "the head is not swapped" in error and "drafts on: " in error, name
        assert message in error and "\n" not in error, (name, error)


@pytest.mark.feature("mtpc_drafts of a request", "exact")
@pytest.mark.feature("min_p, logit_bias", "exact")
@pytest.mark.parametrize(("runner", "head"), COLUMNS)
def test_text_does_not_depend_on_the_number_of_drafts_of_a_request(served: Any, runner: str, head: str) -> None:
    """A number out of range is refused. Options that vLLM serves without drafts have plain vLLM's logprobs too."""
    ours, plain = served(runner, head)
    for name in NUMBERS:
        assert ours[f"greedy, {name}"].tokens == plain["greedy"].tokens, name
        assert ours[f"drawn, {name}"].tokens == (ours if head == "ptp" else plain)["drawn"].tokens, name
    made = {name: reply.drafted for name, reply in ours.items() if not reply.error}
    drafted = dict(zip(made, (now - before for before, now in pairwise([0, *made.values()])), strict=True))
    assert drafted["greedy, none"] == 0 < drafted["greedy, one each"] < 3 * 24  # steps: one token each at least
    assert drafted["greedy, one each"] < drafted["greedy, mixed"] < drafted["greedy, all"]
    for name, theirs in list(plain.items())[2:]:
        assert ours[name].tokens == theirs.tokens, name
        for (one,), (other,) in zip(ours[name].logprobs, theirs.logprobs, strict=True):
            same_logprobs(other or [None] * 3, one or [None] * 3)
        assert drafted[name] > 0, "the request next to them has drafts"
    assert "mtpc_drafts=4; allowed are whole numbers from 0 (no drafts) to 3" in ours["too many"].error


def test_heads_of_equal_shape_are_swapped_where_graphs_hold_their_addresses(folder: Path) -> None:
    """As on a GPU: the weights of the new head draft, a head of another shape is refused."""
    own, same, other = (str(folder / name) for name in ("mtpc", "mtpc-same", "mtpc-other"))
    calls = {"first": call(False), "swapped": call(False, swap=(same,)), "in turns": call(False, swap=(own, same))}
    calls["refused"] = replace(call(False), is_refused=True, swap=(other,))
    ours, plain = answers(folder, "v2", "mtpc", calls, ["first"], "keeps_shapes")
    first, swapped, in_turns, refused = ours.values()
    assert all(reply.tokens == plain["first"].tokens for reply in (first, swapped, in_turns))
    assert swapped.recorded[0]["head"] == same and len(in_turns.recorded) >= 3
    # a head that drafts the least probable tokens: none of its drafts is kept
    assert swapped.accepted - first.accepted < first.accepted / 4
    assert "for which memory and CUDA graphs were made; allowed are heads of equal shape" in refused.error
    assert "it has window=5, the served head 4" in refused.error and "\n" not in refused.error
