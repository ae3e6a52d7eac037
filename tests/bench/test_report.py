"""Rows and tables of `bench serve`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.fakes import BTREE, GREEDY, NGRAM, PLAIN, SAMPLED, measured
from vllm_mtpc.bench.comparison import Comparison, Pass
from vllm_mtpc.bench.report import details, losing, make_rows, overview, unsteady
from vllm_mtpc.engine.counters import Acceptance
from vllm_mtpc.report import markdown, print_table


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


def test_steps_are_those_with_drafts_where_others_are_not_counted() -> None:
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


def test_losing_rows_are_heads_slower_than_plain() -> None:
    found = [*passes(BTREE, SAMPLED, 1.04), *passes(NGRAM, SAMPLED, 2.0)]
    assert [row["decoding"] for row in losing(make_rows(Comparison(found)))] == ["btree"]  # 0.96x
    assert losing(make_rows(Comparison(passes(BTREE, SAMPLED, 1.02)))) == []


def test_unsteady_rows_have_rounds_of_different_speed() -> None:
    found = [*passes(BTREE, SAMPLED, 1.0, 2.1), *passes(PLAIN, SAMPLED, 1.0, 1.9)]
    assert [row["decoding"] for row in unsteady(make_rows(Comparison(found)))] == ["btree"]


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
