"""Pages that are made of something are what it makes today."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from tests.support import compatibility, features
from vllm_mtpc.circuits import get_circuit
from vllm_mtpc.heads.shared import SharedHead

N = len(features.ROWS)


def test_the_compatibility_page_is_what_kept_runs_say(root: Path) -> None:
    written = (root / "docs" / "compatibility.md").read_text(encoding="utf-8")
    command = "python -m tests.support.compatibility --write docs/compatibility.md"
    assert written == compatibility.page(compatibility.kept_runs()), f"type: {command}"


def a_run(kind: str, **ended: int) -> dict[str, Any]:
    cell = {"feature": "top_k", "column": "mtpc on V2", "kind": kind, "why": "", "test": "x.py::test_y"}
    return {
        "time": "2026-01-02T03:04:05+00:00",
        "commit": "abc",
        "command": "pytest",
        "hardware": {"cores": 2, "gpus": ["NVIDIA X"]},
        "versions": {"vllm": "0.33.1", "python": "3.12.3"},
        "passed": 1,
        "failed": [],
        "skipped": {},
        "cells": [{**cell, "passed": 0, "failed": 0, "skipped": 0, **ended}],
    }


@pytest.mark.parametrize(
    ("kind", "ended", "shown"),
    [
        ("distribution", {"passed": 1}, f"1 hold of {N}"),
        ("refused", {"passed": 1}, f"1 refused or off of {N}"),
        ("distribution", {"passed": 1, "failed": 1}, f"**1 failed** of {N}"),
        ("distribution", {"skipped": 1}, "not run"),
    ],
)
def test_a_run_fills_its_own_row_alone(kind: str, ended: dict[str, int], shown: str) -> None:
    text = compatibility.page([a_run(kind, **ended)])
    assert f"| 0.33 | 3.12 | not run | {shown} | not run |" in text
    assert "| 0.32 | 3.12 | not run | not run | not run |" in text and "NVIDIA X" in text


def test_a_run_beyond_what_is_declared_has_a_row() -> None:
    run = a_run("distribution", passed=1)
    run["versions"]["vllm"] = "0.40.0"
    assert f"| 0.40 | 3.12 | not run | 1 hold of {N} | not run |" in compatibility.page([run])


@pytest.mark.parametrize(
    ("vocab", "size"), [(2048, 1024), (32000, 2048), (32000, 4096), (128256, 4096), (151936, 4096)]
)
def test_the_sizes_that_were_computed(root: Path, vocab: int, size: int) -> None:
    """A row of the last table of docs/chat-model.md."""
    window = components = 8
    shown = []
    for component_rank, token_rank in ((0, 0), (16, 0), (16, 32)):
        options = {"expander_rank": 64, "component_rank": component_rank}
        with torch.device("meta"):
            head = SharedHead(get_circuit("btree", window, components), vocab, size, token_rank=token_rank, **options)
        shown.append(f"{sum(parameter.numel() for parameter in head.parameters()) / 1e6:.1f}M")
    logits = f"{4 * window * components * vocab / 1e6:.1f} MB"
    row = f"| {' | '.join([f'{vocab:,}', f'{size:,}', *shown, logits])} |"
    assert row in (root / "docs" / "chat-model.md").read_text(encoding="utf-8"), row


def test_the_figures_can_be_drawn(root: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, root / "scripts" / "site_figures.py", tmp_path], check=True, cwd=root)
    drawn = {file.name for file in tmp_path.glob("*.svg")}
    kept = {file.name: file for file in (root / "docs" / "figures").glob("how-*.svg")}
    assert drawn == set(kept)
    text = (root / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    for name, file in kept.items():
        assert f"(figures/{name})" in text
        assert ElementTree.parse(file).getroot().tag.endswith("svg")
