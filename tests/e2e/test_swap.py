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
NUMBERS: dict[str, list[int | None]] = {  # of drafts, by request
    "all": [None, None, None],
    "none": [0, 0, 0],
    "one each": [1, 1, 1],
    "mixed": [0, 1, None],
}
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


def asking_for(numbers: list[int | None], is_drawn: bool) -> Call:
    return call(is_drawn, *({} if one is None else {"extra_args": {"mtpc_drafts": one}} for one in numbers))


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
    folder: Path, runner: str, head: str, ours: list[Call], plain: list[Call], injected: str | None = None
) -> tuple[list[Reply], list[Reply]]:
    """Replies of an engine with the head, and of plain vLLM."""
    spec = {**OPTIONS[head], "num_speculative_tokens_per_batch_size": "off"}
    spec |= {"min_acceptance": 0.0} if runner == "v1" else {}
    return run_with_plain(build(folder, head, ours, injected, spec), runner, plain)


@pytest.fixture(scope="module")
def swapped(folder: Path) -> Any:
    """To greedy then drawn requests without a swap, with one and with several; to refused swaps; to greedy ones."""

    def of(runner: str, head: str) -> tuple[list[Reply], list[Reply]]:
        own, other, greedy = str(folder / head), str(folder / f"{head}-other"), call(False)
        calls = [call(drawn, swap=swap) for drawn in (False, True) for swap in ((), (other,), (own, other))]
        bad = [replace(greedy, is_refused=True, swap=(str(folder / name),)) for name in REFUSED[head]]
        return answers(folder, runner, head, [*calls, *bad, greedy], [greedy, call(True)])

    return cache(of)


@pytest.mark.feature("a head swapped while serving", "exact")
@pytest.mark.parametrize(("runner", "head"), COLUMNS)
def test_text_does_not_change_when_heads_are_swapped(swapped: Any, runner: str, head: str) -> None:
    ours, plain = swapped(runner, head)
    for number in (0, 1, 2, -1):
        assert ours[number].tokens == plain[0].tokens, number
    for number in (3, 4, 5):  # PTP's seeded text is its own, whatever is drafted
        assert ours[number].tokens == (ours[3] if head == "ptp" else plain[1]).tokens, number
    assert ours[-1].accepted > ours[2].accepted > ours[0].accepted > 0


@pytest.mark.parametrize(("runner", "head"), COLUMNS)
def test_swapped_head_drafts(swapped: Any, folder: Path, runner: str, head: str) -> None:
    ours, _ = swapped(runner, head)
    first, one, several = (ours[number].recorded for number in (0, 1, 2))
    assert first == [] and one[0]["head"] == str(folder / f"{head}-other")
    assert len(several) >= 4
    assert {each["head"] for each in several} == {str(folder / head), str(folder / f"{head}-other")}
    rates = [reply.accepted / reply.steps for reply in ours[:2]]
    assert rates[0] != rates[1]


@pytest.mark.parametrize(("runner", "head"), COLUMNS)
def test_head_that_does_not_fit_is_refused(swapped: Any, runner: str, head: str) -> None:
    ours, _ = swapped(runner, head)
    for reply, (name, message) in zip(ours[6:-1], REFUSED[head].items(), strict=True):
        assert "the head is not swapped" in reply.error and "drafts on: " in reply.error, name
        assert message in reply.error and "\n" not in reply.error, (name, reply.error)


def test_heads_of_equal_shape_are_swapped_where_graphs_hold_their_addresses(folder: Path) -> None:
    """As on a GPU: the weights of the new head draft, a head of another shape is refused."""
    own, same, other = (str(folder / name) for name in ("mtpc", "mtpc-same", "mtpc-other"))
    greedy = call(False)
    calls = [greedy, call(False, swap=(same,)), replace(greedy, is_refused=True, swap=(other,))]
    calls.append(call(False, swap=(own, same)))
    ours, (plain,) = answers(folder, "v2", "mtpc", calls, [greedy], "keeps_shapes")
    first, swapped, refused, in_turns = ours
    assert all(reply.tokens == plain.tokens for reply in (first, swapped, in_turns))
    assert swapped.recorded[0]["head"] == same and len(in_turns.recorded) >= 3
    # a head that drafts the least probable tokens: none of its drafts is kept
    accepted = [reply.accepted for reply in (first, swapped)]
    assert accepted[1] - accepted[0] < accepted[0] / 4
    assert "for which memory and CUDA graphs were made; allowed are heads of equal shape" in refused.error
    assert "it has window=5, the served head 4" in refused.error and "\n" not in refused.error


@pytest.mark.feature("mtpc_drafts of a request", "exact")
@pytest.mark.feature("min_p, logit_bias", "exact")
@pytest.mark.parametrize(("runner", "head"), COLUMNS)
def test_text_does_not_depend_on_the_number_of_drafts_of_a_request(folder: Path, runner: str, head: str) -> None:
    """A number out of range is refused. Options that vLLM serves without drafts have plain vLLM's logprobs too."""
    drawn = head == "mtpc"  # PTP's seeded text is its own
    without = [call(is_drawn, *rows) for is_drawn in [False, *[True] * drawn] for rows in WITHOUT.values()]
    numbers = [asking_for(some, is_drawn) for is_drawn in (False, True) for some in NUMBERS.values()]
    refused = replace(asking_for([4, 4, 4], False), is_refused=True)
    ours, plain = answers(folder, runner, head, [*numbers, *without, refused], [call(False), call(True), *without])

    for name, greedy, sampled in zip(NUMBERS, ours[:4], ours[4:8], strict=True):
        assert greedy.tokens == plain[0].tokens, name
        assert sampled.tokens == (plain[1] if drawn else ours[4]).tokens, name
    made = [reply.drafted for reply in ours[:4]]
    of = dict(zip(NUMBERS, (now - before for before, now in pairwise([0, *made])), strict=True))
    assert of["none"] == 0 < of["one each"] < 3 * 24  # steps: one token each at least
    assert of["one each"] < of["mixed"] < of["all"]

    before = ours[7].drafted
    for name, mine, theirs in zip([*WITHOUT] * 2, ours[8:-1], plain[2:], strict=False):
        assert mine.tokens == theirs.tokens, name
        for (one,), (other,) in zip(mine.logprobs, theirs.logprobs, strict=True):
            same_logprobs(other or [None] * 3, one or [None] * 3)
        assert mine.drafted > before, "the request next to them has drafts"
        before = mine.drafted
    assert "mtpc_drafts=4; allowed are whole numbers from 0 (no drafts) to 3" in ours[-1].error
