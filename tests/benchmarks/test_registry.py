"""The registry of results: complete, with a current table; it finds results that are older than their code."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import registry
from vllm_mtpc.engine.provenance import RESULTS, ROOT


def has_history() -> bool:
    command = ["git", "rev-parse", "--is-shallow-repository"]
    asked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return asked.stdout.strip() == "false"


def test_every_result_is_registered_once_and_its_paths_exist() -> None:
    paths, results = registry.read()
    names = [name for one in results for name in one.files]
    assert sorted(names) == sorted(file.stem for file in RESULTS.glob("*.json"))
    assert {name for one in results for name in one.code} == paths.keys()
    missing = [path for some in paths.values() for path in some if not (ROOT / path).exists()]
    assert not missing


def test_table_is_current() -> None:
    written = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    assert registry.page(written) == written, "type: python -m benchmarks.registry --write benchmarks/RESULTS.md"


@pytest.mark.skipif(not has_history(), reason="needs the git history of the results: clone without --depth")
def test_results_older_than_their_code_have_a_reason_and_others_none() -> None:
    wrong = {one.what: one.old for one in registry.read()[1] if any(registry.changes(one)) != bool(one.old)}
    assert not wrong, f"measure again, or set or remove `old` in benchmarks/registry.yaml: {wrong}"


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """A function that measures with one text of a file and returns what has changed with another."""
    monkeypatch.setattr(registry, "ROOT", tmp_path)
    monkeypatch.setattr(registry, "RESULTS", tmp_path)
    monkeypatch.setattr(registry, "FILE", tmp_path / "registry.yaml")
    one = {"what": "a", "link": "", "command": "", "files": ["one"], "where": "", "code": ["code"]}
    (tmp_path / "registry.yaml").write_text(
        json.dumps({"code": {"code": ["code.py", "a.safetensors"]}, "results": [one]})
    )

    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        return subprocess.run(["git", *who, *words], cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    def change(before: str, after: str, name: str = "code.py") -> list[Any]:
        git("init", "-q")
        (tmp_path / name).write_text(before)
        git("add", ".")
        git("commit", "-q", "-m", "one")
        values = {"commit": git("rev-parse", "HEAD").strip(), "time": "2026-01-01T"}
        (tmp_path / "one.json").write_text(json.dumps(values))
        (tmp_path / name).write_text(after)
        return list(registry.changes(registry.read()[1][0]))

    registry.read.cache_clear()
    registry.code_at.cache_clear()
    yield change
    registry.read.cache_clear()
    registry.code_at.cache_clear()


CODE = 'def f(x):\n    """Return x."""\n    return x\n'


@pytest.mark.parametrize(
    ("after", "is_stale"),
    [
        (CODE, False),
        (CODE.replace("Return x.", "Return the argument.") + "# a comment\n", False),
        (CODE.replace("    return x", "    return x + 1"), True),
        (CODE.replace("return x", "return 'x'"), True),
        ("", True),
    ],
)
def test_changed_code_makes_a_result_stale(measured: Any, after: str, is_stale: bool) -> None:
    assert measured(CODE, after) == ([("one", "code.py")] if is_stale else [])


def test_changed_weights_make_a_result_stale(measured: Any) -> None:
    assert measured("before", "after", "a.safetensors") == [("one", "a.safetensors")]
