"""Hooks of the site (mkdocs.yml): docs/*.md are written as GitHub reads them, and shown alike here."""

from __future__ import annotations

import logging
import os
import re
from typing import Any

from markdown import Extension, Markdown

log = logging.getLogger("mkdocs.hooks.site")  # a warning here ends a strict build
LINK = re.compile(r"\[([^\]]*)\]\((\.\./[^)\s#]*)(#[^)\s]*)?\)")
NUMBER = re.compile(r"(?<!\])\[(\d+)\](?![(:\[])")  # of a footnote that a page counts by itself


class GitHubIndents(Extension):
    """What belongs to a list item is indented by two spaces, as GitHub has it; Python-Markdown wants four."""

    def extendMarkdown(self, md: Markdown) -> None:
        md.tab_length = 2


def on_config(config: Any) -> Any:
    config.markdown_extensions.append(GitHubIndents())
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Links that lead out of docs/ lead to the repository, or are plain text where mkdocs.yml has no address of it.

    A [7] is a number and no link to something called 7.
    """
    root, folder = os.path.dirname(config.config_file_path), os.path.dirname(page.file.abs_src_path)

    def outside(link: re.Match[str]) -> str:
        text, path, anchor = link.groups(default="")
        target = os.path.normpath(os.path.join(folder, path))
        if target.startswith(config.docs_dir + os.sep):
            return link[0]
        if not os.path.exists(target):
            log.warning("%s: the repository has no %s", page.file.src_uri, path)
        if not config.repo_url:
            return text
        kind = "tree" if os.path.isdir(target) else "blob"
        return f"[{text}]({config.repo_url.rstrip('/')}/{kind}/main/{os.path.relpath(target, root)}{anchor})"

    return NUMBER.sub(r"\\[\1\\]", LINK.sub(outside, markdown))
