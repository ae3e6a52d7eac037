"""The patch machinery, on modules made for the test: no vLLM, no GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vllm_mtpc.proposers.patches import patch as machinery
from vllm_mtpc.proposers.patches.patch import Patch, apply, patch

SOURCE = """
TABLE = ["a"]

def work(value, factor):
    '''Multiply.'''
    return value * factor

class Box:
    @staticmethod
    def make(value):
        return ("made", value)

    def keep(self, value):
        return ("kept", value)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = "mtpc_patched_module"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(machinery, "applied", {})
    monkeypatch.setattr(machinery, "problems", [])
    yield name
    sys.modules.pop(name, None)
    machinery._after_import.waiting.pop(name, None)


def doubling(module_name: str, attribute_name: str = "work", needs: tuple[str, ...] = ("value",)) -> Patch:
    @patch(module_name, attribute_name, needs=needs)
    def doubling(original: Callable, *args: object) -> tuple:
        return original(*args), "twice"

    return doubling


def test_a_patch_waits_for_the_import(module: str) -> None:
    apply(doubling(module))
    assert module not in sys.modules
    patched = __import__(module)
    assert patched.work(3, 4) == (12, "twice")
    assert patched.work.__doc__ == "Multiply."
    assert machinery.problems == []


def test_imported_module_is_patched_at_once_and_once(module: str) -> None:
    patched = __import__(module)
    declared = doubling(module)
    apply(declared)
    apply(declared)
    assert patched.work(3, 4) == (12, "twice")


def test_methods_and_static_methods_stay_what_they_are(module: str) -> None:
    patched = __import__(module)
    apply(doubling(module, "Box.make"))
    apply(doubling(module, "Box.keep"))
    assert patched.Box.make(1) == (("made", 1), "twice")
    assert patched.Box().keep(2) == (("kept", 2), "twice")


@pytest.mark.parametrize(
    ("attribute", "needs", "said"),
    [("gone", (), "AttributeError"), ("work", ("value", "temperature"), "no longer takes temperature")],
)
def test_what_vllm_moved_is_reported_and_left_alone(module: str, attribute: str, needs: tuple, said: str) -> None:
    patched = __import__(module)
    apply(doubling(module, attribute, needs))
    assert patched.work(3, 4) == 12
    assert len(machinery.problems) == 1
    assert said in machinery.problems[0] and f"{module}:{attribute}" in machinery.problems[0]


def test_other_imports_are_not_touched(module: str) -> None:
    apply(doubling(module))
    import colorsys

    assert "exec_module" not in vars(colorsys.__loader__)


def test_a_patch_that_cannot_be_made_does_not_fail_the_import(module: str) -> None:
    @patch("mtpc_patched_module", "work")
    def broken(original: Callable) -> Callable:
        raise ImportError("half an install")

    apply(broken)
    assert __import__(module).work(3, 4) == 12
    assert machinery.problems == ["mtpc_patched_module:work (ImportError: half an install)"]
