"""The circuit of CONTRIBUTING.md: its fenced blocks as the file and the line of the registry that they are."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import vllm_mtpc.circuits

NAME, WHERE = "pairs", "vllm_mtpc.circuits.pairs"
TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
SECTION = TEXT.split("## Add a circuit\n")[1].split("\n## ")[0]
FILE, LINE = (re.sub(r"(?m)^   ", "", block) for block in re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL))


@contextmanager
def registered() -> Iterator[None]:
    """Register the file as a circuit, as its line in CIRCUITS does."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        Path(folder, f"{NAME}.py").write_text(FILE, encoding="utf-8")
        patch.setattr(vllm_mtpc.circuits, "__path__", [*vllm_mtpc.circuits.__path__, folder])
        for name, where in eval(f"{{{LINE}}}").items():
            patch.setitem(vllm_mtpc.circuits.CIRCUITS, name, where)
        yield
        sys.modules.pop(WHERE, None)
