"""The advisor: costs are read as they were measured, and the best K of known costs is the one it names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_mtpc import cli, demo
from vllm_mtpc.bench import advise
from vllm_mtpc.bench.advise import Curves, cells
from vllm_mtpc.errors import UsageError
from vllm_mtpc.proposers.config import schedule

BATCHES = [1, 4, 16]


def curves(step: Any, draft: Any, name: str = "btree") -> Curves:
    """Curves of step(batch, rows) and draft(batch, drafts) at the cells that are measured."""
    wanted = cells(BATCHES, 7)
    steps = [[batch, batch * (1 + drafts), step(batch, batch * (1 + drafts))] for batch, drafts in wanted]
    return Curves({"step_ms": steps, "draft_ms": {name: [[b, k, draft(b, k)] for b, k in wanted if k]}})


def test_linear_costs_are_read_back_exactly() -> None:
    found = curves(lambda batch, rows: 3 + 0.5 * batch + 0.25 * rows, lambda batch, drafts: 1 + 0.125 * batch * drafts)
    for batch in (1, 2, 3, 4, 9, 16, 40):
        for drafts in range(8):
            # between measured batches rows per request are kept, so what is linear stays linear
            assert found.step(batch, drafts) == pytest.approx(3 + 0.5 * batch + 0.25 * batch * (1 + drafts))
            if drafts:
                assert found.draft(["btree"], batch, drafts) == pytest.approx(1 + 0.125 * batch * drafts)
    assert found.draft(["btree"], 4, 0) == 0


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([], "no cost curves"),
        ({"step_ms": [[1, 1]]}, "no cost curves"),
        ({"step_ms": [], "draft_ms": {}}, "one entry at least"),
        ({"step_ms": [[1, 1, 1], [1, 1]], "draft_ms": {}}, "[batch, number, ms]"),
        ({"step_ms": [[1, 1, "a"]], "draft_ms": {}}, "from 0 on"),
        ({"step_ms": [[1, 1, -2]], "draft_ms": {}}, "from 0 on"),
        ({"step_ms": [3], "draft_ms": {}}, "[batch, number, ms]"),
        ({"step_ms": [[1, 1, 1]], "draft_ms": {"cp": [[1, 1, float("nan")]]}}, "draft_ms['cp']"),
    ],
)
def test_damaged_curves(values: Any, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        Curves(values)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_head_without_a_curve() -> None:
    found = curves(lambda batch, rows: rows, lambda batch, drafts: 1)
    with pytest.raises(UsageError, match="has drafts of btree, none called mine or cp"):
        found.draft(["mine", "cp"], 1, 1)


@pytest.fixture
def head() -> advise.Candidate:
    return advise.candidate(str(demo.path("btree")), 1.0)


def test_acceptance_is_the_trainers(head: advise.Candidate) -> None:
    figures = json.loads((demo.path("btree") / "provenance.json").read_text())["figures"]
    assert head.tokens[-1] == pytest.approx(figures["t1"]["tokens_per_step"], abs=0.01)
    cold = advise.candidate(str(demo.path("btree")), 0.0)
    assert cold.tokens[-1] == pytest.approx(figures["t0"]["tokens_per_step"], abs=0.01)


def test_the_best_number_of_drafts(head: advise.Candidate) -> None:
    free = advise.choices(head, curves(lambda batch, rows: 5.0, lambda batch, drafts: 0.0), BATCHES)
    assert [choice.drafts for choice in free] == [7, 7, 7]  # rows cost nothing
    assert free[0].gain == pytest.approx(head.tokens[7]) and free[0].tokens_per_second == pytest.approx(
        200 * head.tokens[7]
    )
    dear = advise.choices(head, curves(lambda batch, rows: float(rows), lambda batch, drafts: 0.0), BATCHES)
    assert [choice.drafts for choice in dear] == [0, 0, 0]  # every row costs as much as a step
    slow = advise.choices(head, curves(lambda batch, rows: 5.0, lambda batch, drafts: 10.0 * batch), BATCHES)
    assert [choice.drafts for choice in slow] == [0, 0, 0]
    mixed = advise.choices(head, curves(lambda batch, rows: 8 + 0.25 * rows, lambda batch, drafts: 0.5), BATCHES)
    for choice in mixed:  # the definition, at every K
        speeds = [
            1000 * choice.batch * head.tokens[k] / (8 + 0.25 * choice.batch * (1 + k) + 0.5 * (k > 0)) for k in range(8)
        ]
        assert choice.tokens_per_second >= max(speeds) / advise.WORTH
        assert choice.tokens_per_second == pytest.approx(speeds[choice.drafts])
    assert mixed[0].drafts > mixed[-1].drafts > 0


def test_what_to_paste(head: advise.Candidate) -> None:
    found = [
        advise.Choice(1, 5, 1, 2),
        advise.Choice(4, 5, 1, 1.5),
        advise.Choice(16, 2, 1, 1.1),
        advise.Choice(64, 0, 1, 1),
    ]
    given = advise.speculative_config(head, found)
    assert given["num_speculative_tokens_per_batch_size"] == [[1, 4, 5], [5, 16, 2], [17, 64, 0]]
    assert given["num_speculative_tokens"] == 5 and given["method"] == "mtpc"
    assert schedule.chosen(given["num_speculative_tokens_per_batch_size"], 5) == [(1, 4, 5), (5, 16, 2), (17, 64, 0)]
    none = advise.speculative_config(head, [advise.Choice(8, 0, 1, 1)])
    assert none["num_speculative_tokens_per_batch_size"] == [[1, 8, 0]] and "num_speculative_tokens" not in none


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["advise", *words]) == 1
    message = capsys.readouterr().err.strip()
    assert "\n" not in message
    return message


def test_refusals(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    btree = str(demo.path("btree"))
    assert "--curves FILE" in refusal(capsys, btree)
    assert "either" in refusal(capsys, btree, "--curves", "a", "--measure", "b")
    assert "cannot be read" in refusal(capsys, btree, "--curves", str(tmp_path / "none.json"))
    assert "--concurrency 0" in refusal(capsys, btree, "--curves", "a", "--concurrency", "0")
    assert "--temperature -1" in refusal(capsys, btree, "--curves", "a", "--temperature", "-1")
    assert "folder does not exist" in refusal(capsys, str(tmp_path / "nowhere"), "--curves", "a")


def test_measured_and_advised(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A real engine, few steps: the curves are written, and read again they give the same advice."""
    file, btree = tmp_path / "curves.json", str(demo.path("btree"))
    how = ["--concurrency", "1", "2", "--steps", "4", "--dtype", "float32"]
    assert cli.main(["advise", btree, "--measure", str(file), *how]) == 0
    first = capsys.readouterr().out
    written = json.loads(file.read_text())
    assert {batch for batch, _, _ in written["step_ms"]} == {1, 2} and "commit" in written
    assert {tuple(point[:2]) for point in written["draft_ms"]["btree"]} == {c for c in cells([1, 2], 7) if c[1]}
    assert all(ms > 0 for *_, ms in written["step_ms"] + written["draft_ms"]["btree"])
    given = json.loads(first[first.index("'{") + 1 : first.rindex("'")])
    assert given["model"] == btree and given["num_speculative_tokens_per_batch_size"][0][0] == 1
    assert cli.main(["advise", btree, "--curves", str(file), *how[:3]]) == 0
    assert capsys.readouterr().out == first
