"""The site of docs/ builds and loads nothing from other hosts, links lead to targets."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

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
