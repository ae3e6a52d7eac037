"""The cells of docs/notebook/circuits.ipynb run and assert what they claim."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import execute

FILE = Path(__file__).parents[2] / "docs" / "notebook" / "circuits.ipynb"


@pytest.mark.slow
def test_notebook_runs_and_its_claims_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    notebook = nbformat.read(FILE, as_version=4)
    execute(notebook, cwd=str(FILE.parent), kernel_name="python3", timeout=170)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output["text"] for output in outputs if output.get("name") == "stdout")
    assert "sum over all 81 windows: 1.0000" in printed
    plain, drafted = map(int, re.search(r"160 tokens: (\d+) steps without drafts, (\d+) with", printed).groups())
    assert drafted < plain / 2
