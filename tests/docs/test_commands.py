"""Commands of the documentation: options exist, JSON is JSON, files and modules are there. Nothing is run."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from vllm_mtpc import METHODS
from vllm_mtpc.cli import COMMANDS, _parser

BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`vllm-mtpc ([^`]+)`")
FILE = re.compile(r"(?:\./)?((?:scripts|benchmarks|vllm_mtpc|tests)/[\w./-]+)$")
MODULE = re.compile(r"(?:benchmarks|tests|vllm_mtpc)(?:\.\w+)*$")
ENDS = {"|", "||", "&&", ";", "&", ">", ">>", "<", "do", "done"}


def documents(root: Path) -> list[Path]:
    return [*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md")), root / "kernels" / "README.md"]


def commands_in(text: str) -> Iterator[list[str]]:
    """Words of every command in the bash blocks of a Markdown text; a quotation may go on over lines."""
    for block in (block for _, language, block in BLOCK.findall(text) if language == "bash"):
        pending = ""
        for line in block.replace("\\\n", " ").splitlines():
            pending += line
            lexer = shlex.shlex(pending, posix=True, punctuation_chars=";|&")
            lexer.whitespace_split = True
            try:
                words = ["1" if word == "$k" else word for word in lexer]  # the variable of a loop
            except ValueError:
                pending += "\n"
                continue
            pending = ""
            command: list[str] = []
            for word in [*words, ";"]:
                if word in ENDS and command:
                    yield command
                command = [] if word in ENDS else [*command, word]


def arguments_of_ours(words: list[str]) -> list[str] | None:
    """The arguments of `vllm-mtpc` in a command; None where it is another command."""
    for at, word in enumerate(words):
        if word.rsplit("/", 1)[-1] == "vllm-mtpc" or (word == "vllm_mtpc" and words[at - 1] == "-m"):
            return words[at + 1 :]
    return None


def is_parsed(words: list[str]) -> bool:
    try:
        _parser(words).parse_args(words)
    except SystemExit as end:
        return not end.code
    return True


def options(parser: argparse.ArgumentParser, words: list[str]) -> set[str]:
    """The options of a command and of its subcommand."""
    found = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word in action.choices.keys() & set(words):
                found |= options(action.choices[word], words)
    return found


def problems(words: list[str], root: Path) -> list[str]:
    found = []
    if (own := arguments_of_ours(words)) is not None and not is_parsed(own):
        found.append(f"vllm-mtpc {' '.join(own)}: cannot be parsed")
    for at, word in enumerate(words):
        if (named := FILE.match(word)) and not (root / named[1]).exists() and not word.endswith(".json"):
            found.append(f"{word}: no such file")
        if at and words[at - 1] == "-m" and MODULE.match(word) and not find_spec(word):
            found.append(f"{word}: no such module")
        if "speculative-config" in word:
            text = word.partition("=")[2] or words[at + 1]
            try:
                method = json.loads(text).get("method")
            except ValueError:
                found.append(f"{text}: not JSON")
            else:
                found += [] if method in METHODS else [f"{text}: method {method}"]
    return found


def test_commands_of_the_documentation_are_accepted(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = {file.relative_to(root): file.read_text(encoding="utf-8") for file in documents(root)}
    written = [(file, words) for file, text in texts.items() for words in commands_in(text)]
    assert sum(arguments_of_ours(words) is not None for _, words in written) > 30
    wrong = [f"{file}: {problem}" for file, words in written for problem in problems(words, root)]
    for file, text in texts.items():
        for words in (piece.split() for piece in INLINE.findall(BLOCK.sub("", text))):
            named = {word.partition("=")[0].rstrip(",;.)") for word in words if word.startswith("--")}
            if words[0] not in COMMANDS or named - options(_parser(words), words):
                wrong.append(f"{file}: vllm-mtpc {' '.join(words)}")
    assert not wrong, "\n".join(wrong) + capsys.readouterr().err
