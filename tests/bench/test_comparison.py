"""Order of passes: neither a machine whose speed drifts nor an engine that fails decides a comparison."""

from __future__ import annotations

import pytest

from tests.support.fakes import BTREE, GREEDY, NGRAM, PLAIN, SAMPLED, Engines
from vllm_mtpc.bench.comparison import ORDERS, Comparison, compare
from vllm_mtpc.bench.report import make_rows
from vllm_mtpc.engine.served import Setting
from vllm_mtpc.errors import EngineFailed


def run(engines: Engines, decodings=(PLAIN, BTREE), cells=(SAMPLED,), rounds=1, order="interleaved"):
    into = Comparison()
    compare(decodings, cells, rounds, engines.start, order, into)
    return into


def test_interleaved_rounds_reverse_the_order_of_engines() -> None:
    engines = Engines(lambda *_: 1.0)
    run(engines, cells=[SAMPLED, GREEDY], rounds=2)
    assert engines.log[:2] == [("start", "plain"), ("start", "btree")]  # all run before the first pass
    turns = [entry for entry in engines.log if entry[0] in ("plain", "btree")]
    assert [name for name, *_ in turns] == ["plain", "btree"] * 2 + ["btree", "plain"] * 2
    assert [cell for _, cell, _ in turns] == ["T=1, c=1", "T=1, c=1", "T=0, c=1", "T=0, c=1"] * 2
    assert [first for *_, first in turns] == ["0"] * 4 + ["2"] * 4  # other prompts in the second round


def test_speedup_is_unchanged_when_the_machine_slows_down() -> None:
    """btree takes half of plain's time, while the machine slows down threefold from round to round."""
    found = run(Engines(lambda name, _, turn: 3.0**turn * (0.5 if name == "btree" else 1.0)), rounds=3)
    plain, btree = make_rows(found)
    assert btree["speedups"] == [2.0, 2.0, 2.0] and btree["speedup"] == 2.0
    assert plain["speedup"] is None and plain["tokens_per_second_spread"] == [0.89, 8.0]


def test_sequential_engines_are_compared_with_plain_before_and_after() -> None:
    """Plain takes 1 s before and 2 s after: 8 and 4 tok/s, on average 6."""
    has_drafted = []

    def seconds(name: str, setting: Setting, turn: int) -> float:
        if name == "btree":
            has_drafted.append(True)
            return 0.5
        return 2.0 if has_drafted else 1.0

    engines = Engines(seconds)
    plain, btree = make_rows(run(engines, order="bracketed"))
    alone = [entry for entry in engines.log if entry[0] in ("start", "end")]
    assert alone == [(what, name) for name in ("plain", "btree", "plain") for what in ("start", "end")]
    assert btree["speedup"] == pytest.approx(16 / 6, abs=1e-4)
    assert plain["rounds"] == 2 and plain["tokens_per_second"] == 6.0


@pytest.mark.parametrize("order", ORDERS)
def test_engine_that_does_not_start_is_reported(order: str) -> None:
    engines = Engines(lambda *_: 1.0)
    engines.cannot_start.add("btree")
    found = run(engines, [PLAIN, NGRAM, BTREE], order=order, rounds=2)
    assert {one.decoding.name for one in found.passes} == {"plain", "ngram"}
    assert found.missing == [("btree", "its engine failed: ValueError: no such model", True)]
    engines.cannot_start.add("plain")
    with pytest.raises(EngineFailed, match="no such model"):
        run(engines, order=order)


def test_engine_that_fails_later_keeps_its_passes() -> None:
    def seconds(name: str, setting: Setting, turn: int) -> float:
        if (name, turn) == ("ngram", 1):
            raise EngineFailed("ended\nout of memory")
        return 1.0

    found = run(Engines(seconds), [PLAIN, NGRAM, BTREE], rounds=3)
    assert {row["decoding"]: row["rounds"] for row in make_rows(found)} == {"plain": 3, "ngram": 1, "btree": 3}
    assert found.missing[0].reason == "its engine failed: out of memory"


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (
            "log:\n  File x, line 3\npydantic_core.ValidationError: 1 error\nmethod\n  For further information visit z",
            "pydantic_core.ValidationError: 1 error",
        ),
        ("(EngineCore pid=3) ValueError: too long\nend", "(EngineCore pid=3) ValueError: too long"),
        (
            "ValidationError: 1 validation error for ModelConfig\n  Value error, Unknown dtype\n    For further "
            "information",
            "ValidationError: 1 validation error for ModelConfig Value error, Unknown dtype",
        ),
        ("exit code -9\nKilled", "Killed"),
    ],
)
def test_reason_is_the_last_exception_of_a_log(log: str, reason: str) -> None:
    assert EngineFailed(log).reason == reason
