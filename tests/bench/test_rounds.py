"""Who runs when: a machine that drifts, or an engine that fails, must not decide a comparison."""

from __future__ import annotations

import time

import pytest

from tests.support.fakes import BTREE, GREEDY, NGRAM, PLAIN, SAMPLED, Engines
from vllm_mtpc.bench.report import rows
from vllm_mtpc.bench.rounds import Comparison, Progress, bracketed, interleaved
from vllm_mtpc.engine.passes import Setting
from vllm_mtpc.errors import EngineFailed


def comparison(total: int, deadline: float | None = None) -> Comparison:
    return Comparison(Progress(total, deadline))


def test_a_round_takes_turns_and_the_next_goes_backwards() -> None:
    engines, into = Engines(lambda *_: 1.0), comparison(8)
    interleaved([PLAIN, BTREE], [SAMPLED, GREEDY], 2, engines.start, into)
    turns = [entry for entry in engines.log if entry[0] in ("plain", "btree")]
    first = [("plain", "T=1, c=1"), ("btree", "T=1, c=1"), ("plain", "T=0, c=1"), ("btree", "T=0, c=1")]
    second = [("btree", "T=1, c=1"), ("plain", "T=1, c=1"), ("btree", "T=0, c=1"), ("plain", "T=0, c=1")]
    assert [entry[:2] for entry in turns] == first + second
    assert [entry[2] for entry in turns] == ["0"] * 4 + ["2"] * 4  # other prompts in the second round
    assert engines.log[:2] == [("start", "plain"), ("start", "btree")]  # all alive before the first pass
    assert into.progress.done == into.progress.total == 8


def test_a_machine_that_gets_slower_decides_nothing() -> None:
    """btree takes half of plain's time throughout, while the machine slows down threefold from round to round."""
    engines, into = Engines(lambda name, _, turn: 3.0**turn * (0.5 if name == "btree" else 1.0)), comparison(6)
    interleaved([PLAIN, BTREE], [SAMPLED], 3, engines.start, into)
    plain, btree = rows(into.passes)
    assert btree["speedups"] == [2.0, 2.0, 2.0] and btree["speedup"] == 2.0
    assert plain["speedup"] is None and plain["tokens_per_second_spread"] == [0.89, 8.0]


def test_bracketed_compares_with_plain_before_and_after() -> None:
    """Plain takes 1 s before and 2 s after: 8 and 4 tok/s, on average 6."""
    state = {"plain": 0}

    def seconds(name: str, setting: Setting, turn: int) -> float:
        if name == "btree":
            state["plain"] = 1
            return 0.5
        return 2.0 if state["plain"] else 1.0

    engines, into = Engines(seconds), comparison(3)
    bracketed([PLAIN, BTREE], [SAMPLED], 1, engines.start, into)
    alone = [entry for entry in engines.log if entry[0] in ("start", "end")]
    assert alone == [(what, name) for name in ("plain", "btree", "plain") for what in ("start", "end")]
    plain, btree = rows(into.passes)
    assert btree["speedup"] == pytest.approx(16 / 6, abs=1e-4)
    assert plain["rounds"] == 2 and plain["tokens_per_second"] == 6.0


def test_no_round_is_begun_that_would_not_end_in_time() -> None:
    engines, into = Engines(lambda *_: time.sleep(0.05) or 1.0), comparison(100, time.monotonic() + 0.25)
    interleaved([PLAIN, BTREE], [SAMPLED], 50, engines.start, into)
    rounds = {one.round for one in into.passes}
    assert 1 <= len(rounds) <= 2 and len(into.passes) == 2 * len(rounds)
    assert into.progress.total == into.progress.done

    late = comparison(2, time.monotonic() - 1)
    interleaved([PLAIN, BTREE], [SAMPLED], 1, engines.start, late)
    assert len(late.passes) == 2  # the first round is always run


@pytest.mark.parametrize("way", [interleaved, bracketed])
def test_an_engine_that_does_not_start_is_a_row_not_run(way) -> None:
    engines, into = Engines(lambda *_: 1.0), comparison(6)
    engines.cannot_start.add("ngram")
    way([PLAIN, NGRAM, BTREE], [SAMPLED], 2, engines.start, into)
    assert {one.decoding.name for one in into.passes} == {"plain", "btree"}
    assert [(one.name, one.reason) for one in into.missing] == [
        ("ngram", "its engine failed: ValueError: no such model")
    ]


def test_an_engine_that_fails_later_keeps_the_passes_it_has_made() -> None:
    def seconds(name: str, setting: Setting, turn: int) -> float:
        if (name, turn) == ("ngram", 1):
            raise EngineFailed("ended\nout of memory")
        return 1.0

    engines, into = Engines(seconds), comparison(9)
    interleaved([PLAIN, NGRAM, BTREE], [SAMPLED], 3, engines.start, into)
    assert {row["decoding"]: row["rounds"] for row in rows(into.passes)} == {"plain": 3, "ngram": 1, "btree": 3}
    assert into.missing[0].reason == "its engine failed: out of memory"
    assert into.progress.total == into.progress.done


@pytest.mark.parametrize("way", [interleaved, bracketed])
def test_without_plain_there_is_nothing_to_compare(way) -> None:
    engines = Engines(lambda *_: 1.0)
    engines.cannot_start.add("plain")
    with pytest.raises(EngineFailed, match="no such model"):
        way([PLAIN, BTREE], [SAMPLED], 1, engines.start, comparison(2))


def test_the_cause_is_the_exception_not_the_advice_behind_it() -> None:
    end = "log:\n  File x, line 3\npydantic_core.ValidationError: 1 error\nmethod\n  For further information visit z"
    assert EngineFailed(end).cause == "pydantic_core.ValidationError: 1 error"
    assert EngineFailed("(EngineCore pid=3) ValueError: too long\nend").cause.endswith("ValueError: too long")
    more = (
        "ValidationError: 1 validation error for ModelConfig\n  Value error, Unknown dtype\n    For further information"
    )
    assert EngineFailed(more).cause == "ValidationError: 1 validation error for ModelConfig Value error, Unknown dtype"
    assert EngineFailed("exit code -9\nKilled").cause == "Killed"
