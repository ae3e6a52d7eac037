"""The registry of results: complete, with a current table; it finds results that are older than the code."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from benchmarks import registry
from vllm_mtpc.engine import provenance
from vllm_mtpc.engine.provenance import FOLDERS, RESULTS, ROOT


def test_every_result_is_registered_once() -> None:
    names = [name for one in registry.read() for name in one.files]
    assert sorted(names) == sorted(file.stem for file in RESULTS.glob("*.json"))


def test_table_is_current_and_names_the_commits() -> None:
    written = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    assert registry.page(written) == written, "type: python -m benchmarks.registry --write benchmarks/RESULTS.md"
    for one in registry.read():
        row = next(line for line in written.splitlines() if line.startswith(f"| [{one.what}]("))
        commits = {commit for name in one.files for commit in registry.measured_on(registry.kept(name))}
        assert registry.shown(sorted(commits)) in row


def test_results_of_the_present_code_have_no_reason_to_be_old() -> None:
    current = [one for one in registry.read() if not any(registry.stale(registry.kept(name)) for name in one.files)]
    assert not [one.what for one in current if one.old], "remove `old` from benchmarks/registry.yaml"


def test_registry_has_no_lists_of_paths() -> None:
    values = registry.read()[0].model_dump()
    with pytest.raises(ValidationError, match="code"):
        registry.Result.model_validate({**values, "code": ["kernels"]})


@pytest.mark.parametrize("changed", [*(f"{folder}/code.py" for folder in FOLDERS), "benchmarks/own.py"])
def test_changed_code_makes_a_result_stale(changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.setattr(provenance, "commit", lambda: "a")
    registry.current.cache_clear()
    for folder in (*FOLDERS, "benchmarks"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "code.py").write_text("one")
    (tmp_path / "benchmarks" / "own.py").write_text("one")
    values = {"commit": "a", "trees": provenance.collect("benchmarks/own.py")["trees"], "cases": [{"commit": "a"}]}
    (tmp_path / "benchmarks" / "code.py").write_text("of another benchmark")
    assert not registry.stale(values)
    registry.current.cache_clear()
    (tmp_path / changed).write_text("two")
    assert registry.stale(values) == ["a"]
    assert registry.stale({"commit": "a"}) == ["a"]  # nothing is known of its code
    registry.current.cache_clear()
