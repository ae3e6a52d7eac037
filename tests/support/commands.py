"""Command lines of the documentation, as they stand in its ```bash blocks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
ENDS = {"|", "||", "&&", ";", "&", ">", ">>", "<", "do", "done"}
PLACEHOLDERS = {"$k": "1"}  # of loops in shell


def lines_in(text: str) -> Iterator[list[str]]:
    """Words of every command in the blocks of a Markdown text; what is quoted may go on over lines."""
    for block in (block for _, language, block in BLOCK.findall(text) if language == "bash"):
        pending = ""
        for line in block.replace("\\\n", " ").splitlines():
            pending += line
            words = _words(pending)
            if words is None:
                pending += "\n"
                continue
            pending = ""
            yield from _commands(words)
        if pending:
            raise ValueError(f"a quotation that does not end: {pending}")


def ours(words: list[str]) -> list[str] | None:
    """The arguments of `vllm-mtpc` in a command, whatever starts it; None where it is another."""
    for at, word in enumerate(words):
        if word.rsplit("/", 1)[-1] == "vllm-mtpc":
            return words[at + 1 :]
        if word == "vllm_mtpc" and at and words[at - 1] == "-m":
            return words[at + 1 :]
    return None


def inline(text: str) -> list[list[str]]:
    """Words behind `vllm-mtpc` in pieces of code within a line, which leave things out."""
    without_blocks = BLOCK.sub("", text)
    return [piece.split() for piece in re.findall(r"`vllm-mtpc ([^`]+)`", without_blocks)]


def documents(root: Path) -> list[Path]:
    return [*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md")), root / "kernels" / "README.md"]


def _words(text: str) -> list[str] | None:
    """None where a quotation is not closed yet."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";|&")
    lexer.whitespace_split = True
    try:
        return [PLACEHOLDERS.get(word, word) for word in lexer]
    except ValueError:
        return None


def _commands(words: list[str]) -> Iterator[list[str]]:
    command: list[str] = []
    for word in [*words, ";"]:
        if word in ENDS:
            if command:
                yield command
            command = []
        else:
            command.append(word)
