"""The site of docs/ builds without a warning, loads nothing from other hosts, and every link leads to a target."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

LINK = re.compile(r"\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
HEADING = re.compile(r"#{1,6} +(.+?) *#*$")


class Page(HTMLParser):
    """Links, anchors, and what a browser loads without a click, of a page of HTML."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            if name in ("href", "src") and value:
                self.links.append(value)
                if tag != "a" and not (tag == "link" and ("rel", "canonical") in attrs):
                    self.loads.append(value)


@cache
def html(file: Path) -> Page:
    return Page(file.read_text(encoding="utf-8"))


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
    """`FILE: LINK` for every relative link of HTML or Markdown files without a target inside `root`."""
    wrong = []
    for file in files:
        for link in html(file).links if file.suffix == ".html" else LINK.findall(prose(file)):
            url = urlsplit(link)
            if url.scheme or url.netloc:
                continue
            place = root / url.path.lstrip("/") if url.path.startswith("/") else file.parent / unquote(url.path)
            target = place.resolve() if url.path else file
            target = target / "index.html" if file.suffix == ".html" and target.is_dir() else target
            anchor = "" if url.fragment.startswith("__") else unquote(url.fragment)  # the theme's own
            found = {".html": lambda path: html(path).anchors, ".md": headings}.get(target.suffix, lambda path: set())
            if not target.is_relative_to(root) or not target.exists() or (anchor and anchor not in found(target)):
                wrong.append(f"{file.relative_to(root)}: {link}")
    return wrong


@pytest.fixture(scope="module")
def site(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built where torch and vLLM cannot be imported."""
    out, absent = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("absent")
    for name in ("torch", "vllm"):
        (absent / f"{name}.py").write_text(f"raise ImportError('the site needs no {name}')\n")
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(absent)}
    command = [root / "scripts" / "site.sh", out]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_site_has_every_page_and_no_broken_link(root: Path, site: Path) -> None:
    files = sorted(site.rglob("*.html"))
    assert {page.with_suffix(".html").name for page in (root / "docs").glob("*.md")} <= {file.name for file in files}
    assert not broken_links(site, files)
    assert not [link for file in files for link in html(file).links if "example" in urlsplit(link).netloc]
    assert {"vllm_mtpc.has_heads", "vllm_mtpc.circuits.base.Circuit.sample"} <= html(site / "api.html").anchors


def test_site_loads_nothing_from_other_hosts(site: Path) -> None:
    loaded = {link for file in site.rglob("*.html") for link in html(file).loads}
    assert loaded and not [link for link in loaded if link.startswith(("http", "//"))]
    styles = [file.read_text(encoding="utf-8") for file in site.rglob("*.css")]
    assert styles and not [style for style in styles if "url(http" in style or "url(//" in style]


def test_links_of_the_markdown_lead_to_files_and_headings(root: Path) -> None:
    files = [
        *root.glob("*.md"),
        *(root / "docs").rglob("*.md"),
        *(root / "kernels").rglob("*.md"),
        *(root / "benchmarks").glob("*.md"),
    ]
    assert not broken_links(root, files)


def test_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "heads.md").write_text("# Heads\n\n## Circuits and heads\n")
    (tmp_path / "page.md").write_text(
        "[a](no.md) [b](heads.md#no) [c](heads.md#circuits-and-heads)\n```\n[e](e.md)\n```\n"
    )
    (tmp_path / "x.html").write_text('<p id="a"><a href="#a"></a><a href="#b"></a><a href="x.html#a"></a></p>')
    found = broken_links(tmp_path, [tmp_path / "page.md", tmp_path / "x.html"])
    assert found == ["page.md: no.md", "page.md: heads.md#no", "x.html: #b"]
