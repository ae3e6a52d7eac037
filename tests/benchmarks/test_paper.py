"""The papers' tables: the document shows the result files; Appendix E's HMMs have the properties of their names."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.paper import __main__ as command
from benchmarks.paper import frame
from benchmarks.paper.mtpc_students import HMMS
from vllm_mtpc.circuits import get_circuit
from vllm_mtpc.engine import provenance
from vllm_mtpc.heads.linear import LinearHead

ROWS = [{"n": 8, "tokens_per_step": 2.34567, "first": [1]}, {"n": 16}]


def test_table_of_a_result_file_is_in_the_document(tmp_path, monkeypatch):
    columns = {"n": "n", "tokens_per_step": "tokens/step"}
    table = frame.Table("a title", columns, lambda quick: ROWS, "Smaller here.", "It says so.")
    monkeypatch.setattr(command, "TABLES", {"ptp-table-8": table})
    assert command.main(["ptp-table-8", "--quick", "--out", str(tmp_path)]) == 0
    kept = json.loads((tmp_path / "paper-ptp-table-8.json").read_text())
    assert kept["rows"] == ROWS and kept["title"] == "a title"
    monkeypatch.setattr(frame, "result", lambda name: tmp_path / f"paper-{name}.json")
    shown = frame.section("ptp-table-8", table)
    assert all(part in shown for part in ("### PTP, table 8: a title", "2.346", "The paper:", "It says so."))
    before = (provenance.ROOT / "benchmarks" / "PAPERS.md").read_text(encoding="utf-8")
    text = frame.document(command.TABLES, before)
    assert shown in text and frame.document(command.TABLES, text) == text  # made again, it is the same


def test_document_is_that_of_the_result_files_and_the_published_numbers():
    written = (provenance.ROOT / "benchmarks" / "PAPERS.md").read_text(encoding="utf-8")
    assert frame.document(command.TABLES, written) == written, "type: python -m benchmarks.paper --write"


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
