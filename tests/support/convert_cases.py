"""Run `vllm-mtpc convert` and return its head, or the error line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vllm_mtpc.cli import main


def run(file: Path | str, target: Path, out: Path, *flags: Any) -> int:
    return main(["convert", str(file), "--target", str(target), "--out", str(out), *map(str, flags)])


def convert(file: Path | str, target: Path, *flags: Any) -> Path:
    """The head folder next to the target."""
    out = target.parent / "head"
    assert run(file, target, out, *flags) == 0
    return out


def refusal(file: Path | str, target: Path, capsys: pytest.CaptureFixture[str], *flags: Any) -> str:
    """The one line of the error; nothing is written."""
    out = target.parent / "refused"
    capsys.readouterr()
    assert run(file, target, out, *flags) == 1
    text = capsys.readouterr().err
    assert text.startswith("vllm-mtpc: error: ") and text.count("\n") == 1, text
    assert not out.exists()
    return text
