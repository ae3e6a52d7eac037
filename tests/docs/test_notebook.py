"""docs/notebook/circuits.ipynb: whole, without outputs and anybody's paths; it runs, and asserts what it claims."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from tests.support.links import LINK

SECONDS = 170


@pytest.fixture(scope="module")
def file(root: Path) -> Path:
    return root / "docs" / "notebook" / "circuits.ipynb"


@pytest.fixture
def notebook(file: Path) -> nbformat.NotebookNode:
    return nbformat.read(file, as_version=4)


class ThisInterpreter(KernelSpecManager):
    """The kernel python3 is the interpreter of the tests, whatever else is installed."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=command, display_name=kernel_name, language="python")


def run(notebook: nbformat.NotebookNode, folder: Path) -> str:
    """What the cells print."""
    manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=ThisInterpreter())
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, km=manager, timeout=SECONDS, resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output["text"] for output in outputs if output.get("name") == "stdout")


def test_it_is_whole(file: Path, notebook: nbformat.NotebookNode) -> None:
    nbformat.validate(notebook)
    text = file.read_text(encoding="utf-8")
    assert not re.search(r"(?<![\w.:/<])/[A-Za-z]\w*/\w|\b[A-Z]:\\\\", text)  # a path from a root or a drive
    for cell in notebook.cells:
        if cell.cell_type == "code":
            compile(cell.source, cell.id, "exec")
            assert cell.outputs == [] and cell.execution_count is None
    assert json.loads(text)["metadata"]["kernelspec"]["name"] == "python3"


def test_its_links_lead_somewhere(file: Path, notebook: nbformat.NotebookNode) -> None:
    links = [link for cell in notebook.cells if cell.cell_type == "markdown" for link in LINK.findall(cell.source)]
    assert links and not [link for link in links if not (file.parent / link.partition("#")[0]).is_file()]


@pytest.mark.slow
def test_it_runs_without_settings_of_threads(
    file: Path, notebook: nbformat.NotebookNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    notebook.cells.append(nbformat.v4.new_code_cell("assert torch.get_num_threads() == 1"))
    printed = run(notebook, file.parent)
    assert "sum over all 81 windows: 1.0000" in printed
    plain, drafted = map(int, re.search(r"160 tokens: (\d+) steps without drafts, (\d+) with", printed).groups())
    assert drafted < plain / 2
    steps = dict(re.findall(r"^(\w+) +\d+ steps, ([\d.]+) tokens/step$", printed, re.MULTILINE))
    assert float(steps["btree"]) > float(steps["ff"]) > 1
    pictures = [output for cell in notebook.cells for output in cell.get("outputs", []) if "data" in output]
    assert sum("image/png" in output["data"] for output in pictures) == 4


@pytest.mark.slow
def test_a_claim_that_does_not_hold_would_be_found(file: Path, notebook: nbformat.NotebookNode) -> None:
    """Drafts that are kept whatever the target says."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.source = cell.source.replace(
                "accepted, last = verify(", "accepted, last = torch.full((MANY,), 2), verify("
            ).replace("Sampling())", "Sampling())[1]")
    with pytest.raises(CellExecutionError, match="from_target"):
        run(notebook, file.parent)
