"""Links of the documentation: of the site's HTML, and of the Markdown as GitHub reads it."""

from __future__ import annotations

import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ATTRIBUTES = {"href", "src"}
LINK = re.compile(r"\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
HEADING = re.compile(r"#{1,6} +(.+?) *#*$")


class Page(HTMLParser):
    """What a page of HTML links to or loads, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.loads: list[str] = []  # what a browser fetches unasked
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.ids.add(value)
            if name in ATTRIBUTES and value:
                self.links.append(value)
                if tag != "a" and not (tag == "link" and ("rel", "canonical") in attrs):
                    self.loads.append(value)


@cache
def html(file: Path) -> Page:
    return Page(file.read_text(encoding="utf-8"))


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


def prose(file: Path) -> str:
    """A Markdown file without its blocks and pieces of code."""
    text = re.sub(r"^( *)```.*?^\1```", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", text)


def broken_html(site: Path) -> list[str]:
    """`PAGE: LINK` for every link of a site that leads to no file or no anchor of it."""
    wrong = []
    for file in sorted(site.rglob("*.html")):
        for link in html(file).links:
            if urlsplit(link).scheme or link.startswith("//"):
                continue
            path = unquote(urlsplit(link).path)
            target = (site / path.lstrip("/") if path.startswith("/") else file.parent / path) if path else file
            target = target / "index.html" if target.is_dir() else target
            if not _is_there(target.resolve(), urlsplit(link).fragment):
                wrong.append(f"{file.relative_to(site)}: {link}")
    return wrong


def broken_markdown(root: Path, files: list[Path]) -> list[str]:
    """`FILE: LINK` for every relative link of Markdown files that leads nowhere in the checkout, as GitHub reads it."""
    wrong = []
    for file in files:
        for link in LINK.findall(prose(file)):
            url = urlsplit(link)
            if url.scheme:
                continue
            target = (file.parent / unquote(url.path)).resolve() if url.path else file
            if not target.is_relative_to(root) or not _is_there(target, url.fragment):
                wrong.append(f"{file.relative_to(root)}: {link}")
    return wrong


def _is_there(target: Path, anchor: str) -> bool:
    if not target.exists():
        return False
    if not anchor or anchor.startswith("__"):  # the theme's own
        return True
    known = {".html": lambda: html(target).ids, ".md": lambda: headings(target)}.get(target.suffix)
    return known is not None and unquote(anchor) in known()
