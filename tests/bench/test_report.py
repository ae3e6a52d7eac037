"""Rows and tables of a comparison: medians over rounds, shares of a step, output that differs, cells that lose."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.fakes import BTREE, GREEDY, NGRAM, PLAIN, SAMPLED, decoding, measured
from vllm_mtpc.bench.decodings import V2_INTERPRETED
from vllm_mtpc.bench.report import definitions, details, differing, losing, overview, rows, unsteady
from vllm_mtpc.bench.rounds import Pass
from vllm_mtpc.engine.counters import Acceptance
from vllm_mtpc.engine.steps import Steps
from vllm_mtpc.report import markdown, print_table


def passes(who, cell, seconds, wrong=0, **more) -> list[Pass]:
    """One pass per round next to plain passes of one second."""
    found = []
    for turn, value in enumerate(seconds):
        plain = None if who.is_plain else measured(cell, 1.0)
        found.append(Pass(who, cell, turn, measured(cell, value, wrong, **more), plain, 8.0))
    return found


def test_results_are_medians_and_counters_add_up() -> None:
    steps = [Steps(4, 4, 10, 2.0, 1.5, 0.5), Steps(4, 6, 20, 4.0, 3.0, 1.0), Steps(2, 2, 4, 3.0, 2.0, 0.75)]
    found = passes(BTREE, SAMPLED, [1.0, 0.5, 4.0])
    found = [replace(one, measured=replace(one.measured, steps=some)) for one, some in zip(found, steps, strict=True)]
    (row,) = rows(found)
    assert (row["tokens_per_second"], row["speedup"], row["speedup_spread"]) == (8.0, 1.0, [0.25, 2.0])
    assert row["tokens_per_step"] == 1 + 9 / 12  # 3 accepted in each of three passes, 12 decoding steps of a request
    assert row["drafted_share"] == 9 / 12 and row["rows_per_step"] == round(34 / 12, 3)
    assert row["acceptance_per_position"] == [round(6 / 9, 4), round(3 / 9, 4)]
    assert (row["step_ms"], row["target_ms"], row["draft_ms"], row["draft_share"]) == (3.0, 2.0, 0.75, 0.25)
    assert row["identical"] is None


def test_without_a_clock_steps_are_counted_by_drafts() -> None:
    (row,) = rows(passes(BTREE, SAMPLED, [1.0], steps=None))
    assert row["tokens_per_step"] == 2.0 and row["step_ms"] is None and row["draft_share"] is None
    assert (row["ttft_ms"], row["tpot_ms"]) == (20.0, 5.0)
    header, lines = details([row])
    assert "TTFT ms" in header and "draft ms" not in header and lines[0][header.index("TPOT ms")] == "5.00"


def test_output_that_differs_is_told() -> None:
    found = rows(passes(PLAIN, GREEDY, [1.0, 1.0]) + passes(BTREE, GREEDY, [1.0, 1.0], wrong=1))
    assert [row["identical"] for row in found] == [None, [2, 4]]
    assert [row["decoding"] for row in differing(found)] == ["btree"]
    assert differing(rows(passes(BTREE, GREEDY, [1.0]))) == []
    sampled = rows(passes(BTREE, SAMPLED, [1.0], wrong=2))
    assert sampled[0]["identical"] is None and differing(sampled) == []


def test_heads_that_lose_are_listed_and_peers_are_not_ours() -> None:
    found = rows([*passes(BTREE, SAMPLED, [1.04]), *passes(NGRAM, SAMPLED, [2.0]), *passes(PLAIN, SAMPLED, [2.0])])
    assert [row["decoding"] for row in losing(found)] == ["btree"]  # 0.96x
    assert losing(rows(passes(BTREE, SAMPLED, [1.02]))) == []


def test_rows_are_ordered_and_groups_stay_apart() -> None:
    four = replace(SAMPLED, clients=4)
    ptp = decoding("o-ptp", "ptp", V2_INTERPRETED)
    plain_v2 = decoding("plain", None, V2_INTERPRETED)
    order = [(ptp, SAMPLED), (plain_v2, SAMPLED), (BTREE, GREEDY), (PLAIN, GREEDY), (PLAIN, four), (PLAIN, SAMPLED)]
    found = rows([one for who, cell in order for one in passes(who, cell, [1.0])])
    own = [(row["temperature"], row["clients"]) for row in found if row["group"] != V2_INTERPRETED]
    assert own == [(1.0, 1), (1.0, 4), (0.0, 1), (0.0, 1)]
    header, lines = overview(found, found[0]["group"])
    assert header == ["tok/s (speed-up)", "T=1, c=1", "T=1, c=4", "T=0, c=1"]
    assert lines == [["plain", "8", "8", "8"], ["btree", "not run", "not run", "8 (1.00x)"]]
    assert overview(found, V2_INTERPRETED)[1] == [["o-ptp", "8 (1.00x)"], ["plain", "8"]]
    assert f"o-ptp [{V2_INTERPRETED}]" in markdown(*details(found))


def test_tables_are_markdown_in_a_pipe(capsys: pytest.CaptureFixture) -> None:
    print_table("title", ["a", "b"], [["1", "2"], ["3", "4"]])
    assert capsys.readouterr().out == "\ntitle\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n| 3 | 4 |\n"


def test_memory_added_is_what_the_cache_has_less() -> None:
    found = [replace(one, kv_cache_bytes=9 << 20) for one in passes(PLAIN, SAMPLED, [1.0])]
    found += [replace(one, kv_cache_bytes=6 << 20) for one in passes(BTREE, SAMPLED, [1.0])]
    found += passes(NGRAM, SAMPLED, [1.0])  # a server, which does not say
    assert [row["gpu_mib_added"] for row in rows(found)] == [None, 3.0, None]


def test_rounds_that_differ_are_named_and_cpu_seconds_shown() -> None:
    found = rows([*passes(BTREE, SAMPLED, [1.0, 2.1], cpu_seconds=0.5), *passes(PLAIN, SAMPLED, [1.0, 1.9])])
    assert [row["decoding"] for row in unsteady(found)] == ["btree"] and found[0]["cpu_seconds"] == [0.5, 0.5]
    header, lines = details(found)
    assert lines[0][header.index("CPU s")] == "0.50" and lines[0][header.index("wall s")] == "1.55"


def test_definitions_are_of_what_is_shown() -> None:
    assert any("TTFT" in line for line in definitions(True)) and not any(
        "draft ms" in line for line in definitions(True)
    )
    assert any(line.startswith("draft ms") for line in definitions(False))
    assert all("tokens/step" in "".join(definitions(http)) for http in (True, False))


def test_counters_add_up_and_come_apart_again() -> None:
    one, other = Acceptance(10, 30, 15, (9, 5, 1)), Acceptance(4, 8, 6, (4, 2))
    assert one + other == Acceptance(14, 38, 21, (13, 7, 1))
    assert (one + other) - other == one
