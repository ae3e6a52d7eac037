"""What is kept in benchmarks/results/ was measured on the commit it names, or the documentation says it was not."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from vllm_mtpc.engine import provenance
from vllm_mtpc.errors import UsageError
from vllm_mtpc.report import check_file

FILES = sorted(provenance.RESULTS.glob("*.json"))
MARK = "Measured on a checkout that differed from its commit:"  # opens a paragraph of docs/performance.md


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clean checkout with a folder of results."""
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.setattr(provenance, "RESULTS", tmp_path / "benchmarks" / "results")
    monkeypatch.setattr(provenance, "FIGURES", tmp_path / "docs" / "figures")
    (tmp_path / "code.py").write_text("one")
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "one"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    return tmp_path


def test_results_need_a_clean_checkout(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = checkout / "benchmarks" / "results" / "new.json"
    check_file(kept)
    kept.write_text("{}")  # a result that is not committed yet changes no code
    assert re.fullmatch(r"[0-9a-f]{40}", provenance.commit())
    check_file(kept)
    (checkout / "code.py").write_text("two")
    assert provenance.commit().endswith("+changes")
    check_file(checkout / "elsewhere.json")
    with pytest.raises(UsageError, match=r"--json .*new\.json: the checkout differs from its commit; commit first"):
        check_file(kept)
    monkeypatch.setenv("MTPC_COMMIT", "a" * 40)  # of a copy with an older .git
    assert provenance.commit() == "a" * 40


def test_hashes_are_those_of_git_also_without_git(checkout: Path) -> None:
    for name in ("vllm_mtpc/heads/a.py", "vllm_mtpc/heads.py", "proposers/a/b/c.py", "kernels/run.sh", "tests/é.py"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text(name)
    (checkout / "kernels" / "run.sh").chmod(0o755)
    (checkout / "vllm_mtpc" / "kernels").symlink_to("../kernels")
    subprocess.run(["git", "add", "."], cwd=checkout, check=True)
    command = ["git", "write-tree"]
    tree = subprocess.run(command, cwd=checkout, check=True, capture_output=True, text=True).stdout.strip()
    (checkout / "proposers" / "a" / "__pycache__").mkdir()
    found = provenance.collect("tests")["trees"]
    assert found.keys() == {*provenance.FOLDERS, "tests"}
    for path, known in found.items():
        command = ["git", "rev-parse", f"{tree}:{path}"]
        assert subprocess.run(command, cwd=checkout, capture_output=True, text=True).stdout.strip() == known, path
    assert provenance.collect("/elsewhere/pytest/__main__.py")["trees"] == {
        path: found[path] for path in provenance.FOLDERS
    }


def test_every_result_file_names_its_commit() -> None:
    read = {file.name: json.loads(file.read_text(encoding="utf-8")) for file in FILES}
    # distributions are measured one case after the other, each on a commit of its own
    commits = {name: [one["commit"] for one in kept.get("cases", {"": kept}).values()] for name, kept in read.items()}
    changed = {name for name, found in commits.items() if not all(re.fullmatch(r"[0-9a-f]{40}", one) for one in found)}
    text = (provenance.ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    marked = text.partition(MARK)[2].partition("\n\n")[0]
    assert changed == set(re.findall(r"`([\w-]+\.json)`", marked))
