"""The trainer's benchmark: its rows are complete, its two ways are compared, its formula counts what is allocated."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from benchmarks import training
from benchmarks.training import Job, Shape, check_agreement, chosen, expected_bytes, measure, ways
from vllm_mtpc.errors import UsageError

TINY = Shape("tiny", vocab_size=23, hidden_size=16, window=4, components=2, windows=24, chunk=8)


def test_a_row_says_what_was_measured() -> None:
    row = json.loads(json.dumps(measure(TINY, "cpu")))
    assert Shape(**row["shape"]) == TINY
    assert row["device"] == "cpu" and len(row["seconds"]) == TINY.steps and len(row["losses"]) == 1 + TINY.steps
    assert row["window_tokens_per_second"] == pytest.approx(TINY.window * row["text_tokens_per_second"], rel=1e-3)
    # BTree over four: two inner sums of r x r x (D + 1) and a root; leaves n r V D (README, table of circuits).
    leaves, inner = 4 * 2 * 23 * 16, Job(TINY, torch.device("cpu")).head.circuit.num_inner
    assert row["parameters"] == leaves + inner * 2 * 2 * 17 + 2 * 16
    assert row["peak_bytes"] >= row["base_bytes"] > 0
    assert row["losses"][0] > row["losses"][-1]  # it learns its one batch


@pytest.mark.parametrize("changes", [{}, {"head": "shared"}, {"likelihood": True}])
def test_both_ways_give_the_same_numbers(changes: dict) -> None:
    shape = replace(TINY, **changes)
    rows = [measure(way, "cpu") for way in ways(shape)]
    assert [row["shape"]["chunk"] for row in rows] == [8, 24]
    check_agreement(shape.name, rows)


@pytest.mark.parametrize(("key", "wrong"), [("losses", 1.001), ("gradient_norms", 1.001), ("losses", math.nan)])
def test_ways_that_differ_are_refused(key: str, wrong: float) -> None:
    row = {"shape": {"chunk": 8}, "losses": [5.0, 4.0], "gradient_norms": [0.5, 0.4]}
    check_agreement("tiny", [row, row])
    with pytest.raises(UsageError, match=f"tiny: {key} differ"):
        check_agreement("tiny", [row, {**row, key: [row[key][0], row[key][1] * wrong]}])
    with pytest.raises(UsageError, match=key):  # not a number in both ways is no agreement
        check_agreement("tiny", [{**row, key: [math.nan, 1.0]}] * 2)


def test_a_chunk_that_is_lost_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Injected fault: the trainer leaves out all chunks but the first."""
    from vllm_mtpc.train import losses

    right = losses.step_loss

    def first_chunk_only(head, drafted, tokens, counts, distribution, options):
        return right(head, drafted, tokens[: options.chunk_windows], counts, distribution, options)

    monkeypatch.setattr(losses, "step_loss", first_chunk_only)
    rows = [measure(way, "cpu") for way in ways(TINY)]
    with pytest.raises(UsageError, match="differ"):
        check_agreement("tiny", rows)


TEXT = {"likelihood": True}


@pytest.mark.parametrize("changes", [{}, {"chunk": 256}, {"head": "shared"}, TEXT, TEXT | {"chunk": 256}])
def test_the_formula_counts_what_a_step_allocates(changes: dict) -> None:
    """Against torch's own record of allocations; moments and weights, which exist before the step, are added."""
    shape = replace(Shape("medium", 601, 64, 8, 4, windows=256, chunk=16), **changes)
    job = Job(shape, torch.device("cpu"))
    job.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        job.step()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    measured = most + 12 * job.parameters + 4 * job.frozen + 4 * shape.windows * shape.hidden_size
    # 3 %: the formula leaves out what is smaller than the logits by a factor of r or V.
    assert measured == pytest.approx(expected_bytes(shape, job.parameters, job.frozen), rel=0.03)


def test_the_command_runs_each_way_in_a_process_of_its_own(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(training, "QUICK", (TINY,))
    file = tmp_path / "result.json"
    assert training.main(["--quick", "--device", "cpu", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert [row["shape"]["chunk"] for row in result["rows"]] == [8, 24]
    assert {"command", "commit", "hardware", "versions", "definitions"} <= set(result)
    assert "window tok/s" in capsys.readouterr().out


def test_a_child_that_fails_is_explained() -> None:
    with pytest.raises(UsageError, match=r"exit code 1: .*unknown head 'none'"):
        training.run(replace(TINY, head="none"), "cpu")


def test_shapes_are_chosen_by_name() -> None:
    assert chosen(training.SHAPES, ["demo"]) == [training.SHAPES[0]]
    assert chosen(training.SHAPES, None) == list(training.SHAPES)
    with pytest.raises(UsageError, match="no shape 'dem'; allowed: demo, "):
        chosen(training.SHAPES, ["dem"])
