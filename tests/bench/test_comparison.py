"""Order of passes, rows and tables: neither a machine whose speed drifts nor an engine that fails decides."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.fakes import BTREE, GREEDY, NGRAM, PLAIN, SAMPLED, Engines, measured
from vllm_mtpc.bench.comparison import ORDERS, Comparison, Pass, compare
from vllm_mtpc.bench.report import details, losing, make_rows, overview, unsteady
from vllm_mtpc.engine.counters import Acceptance
from vllm_mtpc.engine.served import Setting
from vllm_mtpc.errors import EngineFailed
from vllm_mtpc.report import markdown, print_table


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


def passes(who, cell, *seconds: float, **more) -> list[Pass]:
    """A pass for each duration, compared with plain passes of one second."""
    return [Pass(who, cell, turn, measured(value, **more), 8.0) for turn, value in enumerate(seconds)]


def test_rows_are_medians_of_rounds_and_sums_of_counters() -> None:
    found = passes(BTREE, SAMPLED, 1.0, 0.5, 4.0, cpu_seconds=0.5)
    (row,) = make_rows(Comparison(found))
    assert (row["tokens_per_second"], row["speedup"], row["speedup_spread"]) == (8.0, 1.0, [0.25, 2.0])
    assert row["tokens_per_step"] == 1 + 9 / 12 and row["drafted_share"] == 9 / 12  # of 12 steps of a request
    assert row["acceptance_per_position"] == [round(6 / 9, 4), round(3 / 9, 4)]
    assert (row["ttft_ms"], row["tpot_ms"], row["identical"]) == (20.0, 5.0, None)
    header, lines = details([row])
    shown = dict(zip(header, lines[0], strict=True))
    assert (shown["TPOT ms"], shown["CPU s"], shown["wall s"], shown["identical"]) == ("5.00", "0.50", "1.00", "-")
    # steps are those with drafts where others are not counted
    (row,) = make_rows(Comparison(passes(NGRAM, SAMPLED, 1.0, acceptance=Acceptance(3, 6, 3, (2, 1)))))
    assert row["tokens_per_step"] == 2.0 and row["drafted_share"] is None


def test_greedy_rows_have_the_counts_of_the_identity_check() -> None:
    found = passes(PLAIN, GREEDY, 1.0) + passes(BTREE, GREEDY, 1.0) + passes(BTREE, SAMPLED, 1.0)
    greedy = {PLAIN: [[1, 2], [3, 4]], BTREE: [[1, 2], [3, 5]]}
    rows = make_rows(Comparison(found, greedy))
    assert [(row["decoding"], row["identical"]) for row in rows] == [
        ("btree", None),
        ("plain", None),
        ("btree", (1, 2)),
    ]


def test_losing_rows_are_slower_than_plain_and_unsteady_rows_have_rounds_of_different_speed() -> None:
    for head, peer, lost in ((1.04, 2.0, ["btree"]), (1.02, 2.0, [])):  # 0.96x and 0.98x; only heads are reported
        rows = make_rows(Comparison([*passes(BTREE, SAMPLED, head), *passes(NGRAM, SAMPLED, peer)]))
        assert [row["decoding"] for row in losing(rows)] == lost
    rows = make_rows(Comparison([*passes(BTREE, SAMPLED, 1.0, 2.1), *passes(PLAIN, SAMPLED, 1.0, 1.9)]))
    assert [row["decoding"] for row in unsteady(rows)] == ["btree"]


def test_tables_are_ordered_by_setting() -> None:
    four = replace(SAMPLED, clients=4)
    order = [(BTREE, GREEDY), (PLAIN, GREEDY), (PLAIN, four), (PLAIN, SAMPLED)]
    found = make_rows(Comparison([one for who, cell in order for one in passes(who, cell, 1.0)]))
    assert [(row["temperature"], row["clients"]) for row in found] == [(1.0, 1), (1.0, 4), (0.0, 1), (0.0, 1)]
    header, lines = overview(found)
    assert header == ["tok/s (speed-up)", "T=1, c=1", "T=1, c=4", "T=0, c=1"]
    assert lines == [["plain", "8", "8", "8"], ["btree", "not run", "not run", "8 (1.00x)"]]
    assert "| T=1, c=4 | plain | 8.0 |" in markdown(*details(found))


def test_tables_in_a_pipe_are_markdown(capsys: pytest.CaptureFixture) -> None:
    print_table("title", ["a", "b"], [["1", "2"], ["3", "4"]])
    assert capsys.readouterr().out == "\ntitle\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n| 3 | 4 |\n"
