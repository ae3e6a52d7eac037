"""The papers' tables: the document shows the result files; Appendix E's HMMs have the properties of their names."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.paper import __main__ as command
from benchmarks.paper import frame
from benchmarks.paper.findings import Claim, Difference, claims
from benchmarks.paper.mtpc_students import HMMS
from vllm_mtpc.circuits import get_circuit
from vllm_mtpc.engine import provenance
from vllm_mtpc.heads.linear import LinearHead

ROWS = [{"n": 8, "tokens_per_step": 2.34567, "first": [1]}, {"n": 16}]


def test_table_of_a_result_file_is_in_the_document(tmp_path, monkeypatch):
    columns = {"n": "n", "tokens_per_step": "tokens/step"}
    table = frame.Table("a title", columns, lambda quick: ROWS, "Smaller here.", "It says so.")
    monkeypatch.setattr(command, "TABLES", {"mtpc-tables-4-to-6": table})
    assert command.main(["mtpc-tables-4-to-6", "--quick", "--out", str(tmp_path)]) == 0
    kept = json.loads((tmp_path / "paper-mtpc-tables-4-to-6.json").read_text())
    assert kept["rows"] == ROWS and kept["title"] == "a title"
    monkeypatch.setattr(frame, "result", lambda name: tmp_path / f"paper-{name}.json")
    shown = frame.section("mtpc-tables-4-to-6", table)
    assert all(part in shown for part in ("### MtPC, tables 4 to 6: a title", "2.346", "It says so."))
    before = (provenance.ROOT / "benchmarks" / "PAPERS.md").read_text(encoding="utf-8")
    text = frame.document(command.TABLES, before)
    assert shown in text and frame.document(command.TABLES, text) == text  # made again, it is the same


@pytest.mark.parametrize("file", command.DOCUMENTS, ids=lambda file: file.name)
def test_document_is_that_of_the_result_files_and_the_published_numbers(file):
    written = file.read_text(encoding="utf-8")
    assert command.DOCUMENTS[file](command.TABLES, written) == written, "type: python -m benchmarks.paper --write"


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([(0.3, 0.1), (0.5, 0.2)], "holds"),
        ([(0.3, 0.1), (0.1, 0.1)], "within noise"),
        ([(0.3, 0.1), (-0.3, 0.1)], "does not hold"),
        ([(0.3, None), (0.1, 0.1)], "true of these rows"),
        ([(0.3, None), (-0.1, 0.1)], "not true of these rows"),
        ([], "not measured"),
    ],
)
def test_verdict_follows_from_the_errors(differences, verdict):
    assert Claim("a", [Difference(*one) for one in differences]).verdict == verdict


def test_finding_follows_its_rows():
    """A falsified cell changes the verdict."""
    rows = [{"window": 8, "n": n, "variant": v, "tokens_per_step": 1.0 + n / 10, "standard_error": 0.01}
            for v in ("o-ptp", "independent") for n in (2, 4, 8)]  # fmt: skip
    assert [one.verdict for one in claims("ptp-table-8", rows)] == ["holds", "holds"]
    rows[1]["tokens_per_step"] = 1.1
    assert "**does not hold** (-0.100 ± 0.014, +0.700 ± 0.014)" in claims("ptp-table-8", rows)[0].line()


def test_students_are_compared_by_the_seeds_that_both_have() -> None:
    """Seeds differ by 1, the students by 0.1 with each seed: errors of independent rows would hide the difference."""
    cells = {"window": 8, "variant": "o-ptp", "standard_error": 0.6, "of_texts": 0.003}
    by_seed = {2: {0: 1.0, 1: 2.0, 2: 9.0}, 4: {0: 1.11, 1: 2.09}}
    rows = [{**cells, "n": n, "tokens_per_step": 1.5, "by_seed": by_seed[n]} for n in (2, 4)]
    assert "**holds** (+0.100 ± 0.011)" in claims("ptp-table-8", rows)[0].line()
    del rows[1]["by_seed"][1]
    assert "**within noise** (+0.000 ± 0.849)" in claims("ptp-table-8", rows)[0].line()


def test_served_cells_have_no_error_of_the_expected_ones() -> None:
    rows = json.loads(frame.result("mtpc-table-1").read_text(encoding="utf-8"))["rows"]
    served = claims("mtpc-table-1", rows)[-1]
    assert served.text.startswith("Served") and {one.error for one in served.differences} == {None}


def test_published_numbers_fit_their_tables():
    assert frame.published().keys() <= command.TABLES.keys()
    for one in frame.published().values():
        assert all(len(row) == len(one["columns"]) for row in one["rows"])


@pytest.mark.parametrize("what", list(HMMS)[1:])
def test_hmm_keeps_its_property_in_training(what):
    torch.manual_seed(0)
    head = LinearHead(get_circuit("hmm", 4, 3), 7, 5)
    HMMS[what].trainer.prepare(head)
    optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], 0.1)
    for _ in range(3):
        params = head(torch.randn(6, 5))
        (params.inner.exp()[:, :, 0] * torch.randn(6, head.circuit.num_inner, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    one, other = head(torch.randn(2, 5)).inner
    assert torch.equal(one, other) == (what == "not contextual")
    assert torch.allclose(one[:1].expand_as(one), one) == (what == "homogeneous")
