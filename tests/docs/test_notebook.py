"""docs/notebook/circuits.ipynb has no outputs and no paths of a machine; its cells run and assert what they claim."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import execute

FILE = Path(__file__).parents[2] / "docs" / "notebook" / "circuits.ipynb"
LINK = re.compile(r"\]\(([^)\s]+)")


def test_notebook_is_stored_without_outputs_and_its_links_resolve() -> None:
    notebook = nbformat.read(FILE, as_version=4)
    nbformat.validate(notebook)
    assert not re.search(r"(?<![\w.:/<])/[A-Za-z]\w*/\w|\b[A-Z]:\\\\", FILE.read_text(encoding="utf-8"))
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None
        else:
            assert all((FILE.parent / link.partition("#")[0]).is_file() for link in LINK.findall(cell.source))


@pytest.mark.slow
def test_notebook_runs_and_its_claims_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    notebook = nbformat.read(FILE, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell("assert torch.get_num_threads() == 1"))
    execute(notebook, cwd=str(FILE.parent), kernel_name="python3", timeout=170)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output["text"] for output in outputs if output.get("name") == "stdout")
    assert "sum over all 81 windows: 1.0000" in printed
    plain, drafted = map(int, re.search(r"160 tokens: (\d+) steps without drafts, (\d+) with", printed).groups())
    assert drafted < plain / 2
