"""The site of docs/ builds and loads nothing from other hosts, links lead to targets, generated pages are current."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.heads.head import build_head

CODE = re.compile(r"^( *)```.*?^\1```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!\w+:)([^)\s#]*)#?([^)\s]*)\)")  # of a file here; its anchor
LOADED = re.compile(r"<(?!a\b)\w+\b(?![^>]*\bcanonical\b)[^>]*\b(?:src|href)=\"?([^\"\s>]+)")  # without a click


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub makes of the headings of a Markdown text."""
    headings = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line) for line in re.findall(r"^#+ +(.+)", text, re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_site_has_every_page_and_loads_nothing_from_other_hosts(root: Path, tmp_path: Path) -> None:
    """Built where torch and vLLM cannot be imported; MkDocs refuses links without a target (mkdocs.yml)."""
    for name in ("torch", "vllm"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('the site needs no {name}')\n")
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)}
    command = [root / "scripts" / "site.sh", tmp_path / "site"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {file.name: file.read_text(encoding="utf-8") for file in (tmp_path / "site").rglob("*.html")}
    assert {page.with_suffix(".html").name for page in (root / "docs").glob("*.md")} <= pages.keys()
    assert 'id="vllm_mtpc.circuits.base.Circuit.sample"' in pages["api.html"]
    loaded = {link for page in pages.values() for link in LOADED.findall(page)}
    assert loaded and not [link for link in loaded if link.startswith(("http", "//"))]


def test_links_of_the_markdown_lead_to_files_and_headings(root: Path) -> None:
    wrong, places = [], ("*.md", "docs/**/*.md", "kernels/**/*.md", "benchmarks/*.md")
    for file in (file for place in places for file in root.glob(place)):
        for path, anchor in LINK.findall(CODE.sub("", file.read_text(encoding="utf-8"))):
            target = (file.parent / path).resolve() if path else file
            if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
                wrong.append(f"{file.relative_to(root)}: {path}#{anchor}")
    assert not wrong


@pytest.mark.parametrize("vocab, size", [(2048, 1024), (32000, 2048), (32000, 4096), (128256, 4096), (151936, 4096)])
def test_table_of_head_sizes_is_computed(root: Path, vocab: int, size: int) -> None:
    """A row of the last table of docs/your-model.md."""
    shown = []
    for component_rank, token_rank in ((0, 0), (16, 0), (16, 32)):
        leaves = {"kind": "lm_head", "component_rank": component_rank, "token_rank": token_rank}
        sizes = {"circuit": "btree", "num_components": 8, "window": 8, "trunk": {"kind": "none"}, "leaves": leaves}
        with torch.device("meta"):
            target = {"vocab_size": vocab, "hidden_size": size}
            head = build_head(HeadConfig.create(**sizes, target=target, verifier="x"))
        shown.append(f"{sum(parameter.numel() for parameter in head.parameters()) / 1e6:.1f}M")
    row = f"| {' | '.join([f'{vocab:,}', f'{size:,}', *shown, f'{4 * 8 * 8 * vocab / 1e6:.1f} MB'])} |"
    assert row in (root / "docs" / "your-model.md").read_text(encoding="utf-8"), row
