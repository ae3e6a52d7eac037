"""Generated pages and figures are those that their sources give today."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support import claims, compatibility, features
from vllm_mtpc.circuits import get_circuit
from vllm_mtpc.heads.shared import SharedHead

PAGES = {"benchmarks/FEATURES.md": features, "benchmarks/COMPATIBILITY.md": compatibility, "tests/claims.md": claims}


@pytest.mark.parametrize("file", PAGES)
def test_page_is_what_the_kept_runs_and_the_tests_give(root: Path, file: str) -> None:
    written, module = (root / file).read_text(encoding="utf-8"), PAGES[file]
    assert written == module.page(), f"type: python -m {module.__name__} --write {file}"


@pytest.mark.parametrize("vocab, size", [(2048, 1024), (32000, 2048), (32000, 4096), (128256, 4096), (151936, 4096)])
def test_table_of_head_sizes_is_computed(root: Path, vocab: int, size: int) -> None:
    """A row of the last table of docs/your-model.md."""
    shown = []
    for component_rank, token_rank in ((0, 0), (16, 0), (16, 32)):
        with torch.device("meta"):
            options = {"expander_rank": 64, "component_rank": component_rank, "token_rank": token_rank}
            head = SharedHead(get_circuit("btree", 8, 8), vocab, size, **options)
        shown.append(f"{sum(parameter.numel() for parameter in head.parameters()) / 1e6:.1f}M")
    row = f"| {' | '.join([f'{vocab:,}', f'{size:,}', *shown, f'{4 * 8 * 8 * vocab / 1e6:.1f} MB'])} |"
    assert row in (root / "docs" / "your-model.md").read_text(encoding="utf-8"), row


def test_figures_can_be_drawn(root: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, root / "scripts" / "site_figures.py", tmp_path], check=True, cwd=root)
    drawn = {file.name for file in tmp_path.glob("*.svg")}
    assert drawn and drawn == {file.name for file in (root / "docs" / "figures").glob("how-*.svg")}
