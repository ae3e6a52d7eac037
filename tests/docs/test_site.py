"""The site of docs/ builds without a warning, loads nothing from elsewhere, and its links lead somewhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from mkdocs.config import load_config

from tests.support import links

BROKEN = "[a](nowhere.md) [b](heads.md#nothing) [c](../kernels/nothing.py) [d](heads.md#circuits-and-heads)\n"


def test_every_page_is_in_the_site(root: Path, site: Path) -> None:
    for page in (root / "docs").glob("*.md"):
        assert (site / page.with_suffix(".html").name).is_file()


def test_links_and_anchors(site: Path) -> None:
    assert not links.broken_html(site)


def test_a_broken_link_would_be_found(tmp_path: Path) -> None:
    hrefs = ["#a", "#b", "no.html", "x.html#a", "x.html#b"]
    (tmp_path / "x.html").write_text('<p id="a">' + "".join(f'<a href="{href}">x</a>' for href in hrefs))
    found = [line.removeprefix("x.html: ") for line in links.broken_html(tmp_path)]
    assert found == ["#b", "no.html", "x.html#b"]


def test_no_page_links_to_an_example_address(site: Path) -> None:
    linked = {urlsplit(link).netloc for file in site.rglob("*.html") for link in links.html(file).links}
    assert not [place for place in linked if "example" in place]


@pytest.mark.parametrize("address", ["", "https://host.example/r"])
def test_link_out_of_the_docs_leads_to_the_repository_or_is_text(
    root: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MTPC_REPOSITORY", address)
    config = load_config(str(root / "mkdocs.yml"))
    file = SimpleNamespace(abs_src_path=str(root / "docs" / "x.md"), src_uri="x.md")
    text = "[`base`](../setup.py#L1) [a](../docs/heads.md) [kernels](../kernels)"
    (hook,) = config.plugins.events["page_markdown"][:1]
    shown = hook(text, page=SimpleNamespace(file=file), config=config)
    blob, tree = "(https://host.example/r/blob/main/setup.py#L1)", "(https://host.example/r/tree/main/kernels)"
    own = f"[`base`]{blob} [a](../docs/heads.md) [kernels]{tree}"
    assert shown == (own if address else "`base` [a](../docs/heads.md) kernels")


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    loaded = {link for file in site.rglob("*.html") for link in links.html(file).loads}
    assert loaded and not [link for link in loaded if link.startswith(("http", "//"))]
    styles = [file.read_text(encoding="utf-8") for file in site.rglob("*.css")]
    assert styles and not [style for style in styles if "url(http" in style or "url(//" in style]


def test_the_api_is_read_from_docstrings(site: Path) -> None:
    page = links.html(site / "api.html")
    assert {"vllm_mtpc.has_heads", "vllm_mtpc.circuits.base.Circuit.sample", "vllm_mtpc.ray_serve.app"} <= page.ids
    assert "Exact draws" in (site / "api.html").read_text(encoding="utf-8")


def test_links_of_the_markdown(root: Path) -> None:
    files = [*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "kernels").rglob("*.md")]
    assert not links.broken_markdown(root, files)


def test_a_broken_link_of_the_markdown_would_be_found(root: Path, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "heads.md").write_text("# Heads\n\n## Circuits and heads\n")
    (tmp_path / "docs" / "page.md").write_text(BROKEN + "```\n[e](e.md)\n```\n")
    found = links.broken_markdown(tmp_path, [tmp_path / "docs" / "page.md"])
    assert [line.split(": ")[1] for line in found] == ["nowhere.md", "heads.md#nothing", "../kernels/nothing.py"]


def test_a_warning_ends_the_build(root: Path, tmp_path: Path) -> None:
    """Of a page that links to nothing, inside docs/ or outside."""
    for name in ("scripts", "docs", "vllm_mtpc", "kernels", "README.md", "benchmarks"):
        (tmp_path / name).symlink_to(root / name)
    (tmp_path / "docs").unlink()
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(BROKEN)
    (tmp_path / "docs" / "heads.md").write_text("# Heads\n\n## Circuits and heads\n")
    text = (root / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[0]
    (tmp_path / "mkdocs.yml").write_text(text)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", "site"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert all(link in done.stderr for link in ("nowhere.md", "#nothing", "../kernels/nothing.py")), done.stderr
