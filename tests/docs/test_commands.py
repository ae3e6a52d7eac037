"""What the documentation tells to type: options exist, JSON is JSON, files are there. Nothing is run."""

from __future__ import annotations

import argparse
import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support import commands
from vllm_mtpc import METHODS
from vllm_mtpc.cli import COMMANDS, _parser

FILE = re.compile(r"(?:\./)?((?:scripts|benchmarks|vllm_mtpc|tests)/[\w./-]+)$")
MODULE = re.compile(r"(?:benchmarks|tests|vllm_mtpc)(?:\.\w+)*$")


def problem(words: list[str]) -> str | None:
    """What is wrong with the arguments of `vllm-mtpc`."""
    try:
        _parser(words).parse_args(words)
    except SystemExit as end:
        if end.code:
            return "cannot be parsed"
    return None


def options(words: list[str]) -> set[str]:
    """The options of the command that is typed, and of a command of it."""
    parser: argparse.ArgumentParser = _parser(words)
    found: set[str] = set()
    for word in [None, *words]:
        inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        if word is not None and inner and word in inner[0].choices:
            parser = inner[0].choices[word]
        found |= set(parser._option_string_actions)
    return found


def wrong_in(words: list[str], root: Path) -> list[str]:
    """Everything that is wrong with a command."""
    found = []
    if (own := commands.ours(words)) is not None and problem(own):
        found.append(f"vllm-mtpc {' '.join(own)}: cannot be parsed")
    for at, word in enumerate(words):
        if (named := FILE.match(word)) and not (root / named[1]).exists() and not word.endswith(".json"):
            found.append(f"{word}: is not there")
        if at and words[at - 1] == "-m" and MODULE.match(word) and not find_spec(word):
            found.append(f"{word}: no such module")
        if "speculative-config" in word:
            text = word.partition("=")[2] or words[at + 1]
            try:
                method = json.loads(text).get("method")
            except ValueError:
                found.append(f"{text}: is no JSON")
            else:
                found += [] if method in METHODS else [f"{text}: method {method}"]
    return found


@pytest.fixture(scope="module")
def written(root: Path) -> list[tuple[str, list[str]]]:
    found = []
    for file in commands.documents(root):
        for words in commands.lines_in(file.read_text(encoding="utf-8")):
            found.append((str(file.relative_to(root)), words))
    return found


def test_commands_of_the_documentation(
    written: list[tuple[str, list[str]]], root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sum(commands.ours(words) is not None for _, words in written) > 40
    wrong = [f"{file}: {text}" for file, words in written for text in wrong_in(words, root)]
    assert not wrong, "\n".join(wrong) + capsys.readouterr().err


def test_options_within_the_text(root: Path) -> None:
    """Pieces such as `vllm-mtpc eval --simulate`: the command and its options exist."""
    wrong = []
    for file in commands.documents(root):
        for words in commands.inline(file.read_text(encoding="utf-8")):
            named = {word.partition("=")[0].rstrip(",;.)") for word in words if word.startswith("--")}
            if words[0] not in COMMANDS or named - options(words):
                wrong.append(f"{file.relative_to(root)}: vllm-mtpc {' '.join(words)}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("vllm-mtpc eval HEAD --data X", 0),
        ("vllm-mtpc eval HEAD --dara X", 1),
        ("vllm-mtpc eval HEAD --data X    # what is said\nvllm-mtpc evil HEAD", 1),
        ("for k in 0 1; do\n    python -m vllm_mtpc train --lora-layers $k --out X\ndone", 0),
        ("vllm-mtpc bench serve \\\n    --demo --jsn FILE | tail", 1),
        ("""vllm serve X --speculative-config '{"method": "mtpc",\n "model": "H"}'""", 0),
        ("""vllm serve X --speculative-config '{"method": "mtcp"}'""", 1),
        ("scripts/setup.sh && scripts/sutep.sh", 1),
        ("python -m benchmarks.sweep X; python -m benchmarks.swoop X", 1),
    ],
)
def test_a_wrong_command_would_be_found(text: str, count: int, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = [wrong for words in commands.lines_in(f"```bash\n{text}\n```\n") for wrong in wrong_in(words, root)]
    assert len(found) == count, found


def test_a_wrong_option_within_the_text_would_be_found() -> None:
    assert "--simulate" in options(["eval"]) and "--simulat" not in options(["eval"])
    assert "--peers" in options(["bench", "serve"])
