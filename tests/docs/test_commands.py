"""Commands of the documentation: options exist, JSON is JSON, files and modules are there. Nothing is run."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from vllm_mtpc import METHODS
from vllm_mtpc.cli import _parser

BLOCK = re.compile(r"^( *)```bash\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"(?:\./)?((?:scripts|benchmarks|vllm_mtpc|tests)/[\w./-]+)$")
MODULE = re.compile(r"(?:benchmarks|tests|vllm_mtpc)(?:\.\w+)*$")
ENDS = {"|", "||", "&&", ";", "&", ">", ">>", "<", "do", "done"}


def commands_in(text: str) -> Iterator[list[str]]:
    """Yield the words of every command in the bash blocks of a Markdown text; a quotation may span lines."""
    for _, block in BLOCK.findall(text):
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
            pending, command = "", list[str]()
            for word in [*words, ";"]:
                if word in ENDS and command:
                    yield command
                command = [] if word in ENDS else [*command, word]


def arguments_of_vllm_mtpc(words: list[str]) -> list[str] | None:
    for at, word in enumerate(words):
        if word.rsplit("/", 1)[-1] == "vllm-mtpc" or (word == "vllm_mtpc" and words[at - 1] == "-m"):
            return words[at + 1 :]
    return None


def problems(words: list[str], root: Path) -> Iterator[str]:
    if (arguments := arguments_of_vllm_mtpc(words)) is not None:
        try:
            _parser(arguments).parse_args(arguments)
        except SystemExit as end:
            if end.code:
                yield f"vllm-mtpc {' '.join(arguments)}: cannot be parsed"
    for at, word in enumerate(words):
        if (named := FILE.match(word)) and not (root / named[1]).exists() and not word.endswith(".json"):
            yield f"{word}: no such file"
        if at and words[at - 1] == "-m" and MODULE.match(word) and not find_spec(word):
            yield f"{word}: no such module"
        if "speculative-config" in word:
            text = word.partition("=")[2] or words[at + 1]
            if json.loads(text).get("method") not in (*METHODS, None):
                yield f"{text}: unknown method"


def test_commands_of_the_documentation_are_accepted(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [*root.glob("*.md"), *(root / "docs").rglob("*.md"), root / "kernels" / "README.md"]
    written = [(file, words) for file in files for words in commands_in(file.read_text(encoding="utf-8"))]
    assert sum(arguments_of_vllm_mtpc(words) is not None for _, words in written) > 30
    wrong = [f"{file.name}: {problem}" for file, words in written for problem in problems(words, root)]
    assert not wrong, "\n".join(wrong) + capsys.readouterr().err
