"""The site of docs/ builds and loads nothing from other hosts, links lead to targets, generated pages are current."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import torch

from tests.support import features
from vllm_mtpc.circuits import get_circuit
from vllm_mtpc.heads.shared import SharedHead

LINK = re.compile(r"\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
HEADING = re.compile(r"#{1,6} +(.+?) *#*$")
LOADED = re.compile(r"<(?!a\b)\w+\b(?![^>]*\bcanonical\b)[^>]*\b(?:src|href)=\"?([^\"\s>]+)")  # without a click


def prose(file: Path) -> str:
    """A Markdown file without its blocks and pieces of code."""
    text = re.sub(r"^( *)```.*?^\1```", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", text)


@cache
def headings(file: Path) -> set[str]:
    """Anchors that GitHub makes of a Markdown file's headings."""
    found: list[str] = []
    for line in prose(file).splitlines():
        if match := HEADING.match(line):
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", match[1]).lower()
            slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
            found.append(f"{slug}-{found.count(slug)}" if slug in found else slug)
    return set(found)


def broken_links(root: Path, files: list[Path]) -> list[str]:
    """`FILE: LINK` for every relative link of Markdown files without a target inside `root`."""
    wrong = []
    for file in files:
        for link in LINK.findall(prose(file)):
            url = urlsplit(link)
            if url.scheme or url.netloc:
                continue
            target = (file.parent / unquote(url.path)).resolve() if url.path else file
            is_file = target.is_relative_to(root) and target.exists()
            anchors = headings(target) if is_file and target.suffix == ".md" else set()
            if not is_file or (url.fragment and unquote(url.fragment) not in anchors):
                wrong.append(f"{file.relative_to(root)}: {link}")
    return wrong


@pytest.fixture(scope="module")
def site(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built where torch and vLLM cannot be imported; MkDocs refuses links without a target (mkdocs.yml)."""
    out, absent = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("absent")
    for name in ("torch", "vllm"):
        (absent / f"{name}.py").write_text(f"raise ImportError('the site needs no {name}')\n")
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(absent)}
    done = subprocess.run([root / "scripts" / "site.sh", out], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_site_has_every_page_and_loads_nothing_from_other_hosts(root: Path, site: Path) -> None:
    pages = {file.name: file.read_text(encoding="utf-8") for file in site.rglob("*.html")}
    assert {page.with_suffix(".html").name for page in (root / "docs").glob("*.md")} <= pages.keys()
    for name in ("vllm_mtpc.has_heads", "vllm_mtpc.circuits.base.Circuit.sample"):
        assert f'id="{name}"' in pages["api.html"]
    loaded = {link for page in pages.values() for link in LOADED.findall(page)}
    assert loaded and not [link for link in loaded if link.startswith(("http", "//"))]
    styles = [file.read_text(encoding="utf-8") for file in site.rglob("*.css")]
    assert styles and not [style for style in styles if "url(http" in style or "url(//" in style]


def test_links_of_the_markdown_lead_to_files_and_headings(root: Path) -> None:
    places = (root.glob("*.md"), (root / "docs").rglob("*.md"), (root / "kernels").rglob("*.md"))
    assert not broken_links(root, [*(file for place in places for file in place), *(root / "benchmarks").glob("*.md")])


def test_feature_page_is_what_the_kept_runs_give(root: Path) -> None:
    written = (root / "benchmarks" / "FEATURES.md").read_text(encoding="utf-8")
    assert written == features.page(), "type: python -m tests.support.features --write benchmarks/FEATURES.md"


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
