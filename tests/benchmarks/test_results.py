"""Result files: registered, measured on the commits that they name, not edited since, medians of their rounds."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable, Iterator
from functools import cache
from statistics import median
from typing import Any

import pytest

from benchmarks import registry
from vllm_mtpc.engine.provenance import FOLDERS, RESULTS, ROOT

NAMES = sorted(file.stem for file in RESULTS.glob("*.json"))


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


needs_history = pytest.mark.skipif(
    git("rev-parse", "--is-shallow-repository") != "false", reason="needs the git history: clone without --depth"
)


@cache
def tree(commit: str, path: str) -> str:
    return git("rev-parse", "--verify", "--quiet", f"{commit}:{path}")


@cache
def is_in_history(commit: str) -> bool:
    return git("merge-base", commit, "HEAD") == commit


def wrong_commits(values: Any) -> Iterator[str]:
    """Yield commits of a result that are not in the history, lack the hash of a folder, or have another than git's."""
    for commit, trees in registry.trees_of(values).items():
        if not {*FOLDERS} <= trees.keys() or not is_in_history(commit):
            yield commit
    for one in registry.entries(values):
        if any(tree(one["commit"], path) != known for path, known in one.get("trees", {}).items()):
            yield one["commit"]


def versions(name: str) -> Iterator[Any]:
    """Yield the content of a result in each commit that changed it."""
    path = f"benchmarks/results/{name}.json"
    for commit in git("log", "--format=%H", "--", path).split():
        if text := git("show", f"{commit}:{path}"):
            yield json.loads(text)


def edited(values: Any, before: Iterable[Any]) -> Iterator[str]:
    """Yield the parts of a result (cases; else "") that another version has with the same time and other content."""
    parts = values.get("cases", {"": values})
    for version in before:
        for name, other in version.get("cases", {"": version}).items():
            own = parts.get(name, {})
            if own.get("time") == other.get("time") and without_trees(own) != without_trees(other):
                yield name


def without_trees(values: Any) -> Any:
    """Return a result without hashes, which were added to the results of before 2026-11-28 from their commits."""
    if isinstance(values, list):
        return [without_trees(one) for one in values]
    if isinstance(values, dict):
        return {key: without_trees(one) for key, one in values.items() if key not in ("trees", "runs")}
    return values


def wrong_medians(values: Any) -> Iterator[tuple[str, Any]]:
    """Yield each row of `bench serve` whose numbers are not those of its rounds and of plain vLLM's."""
    plain: dict[Any, list[float]] = {}
    for row in values["rows"]:
        rates = [tokens / seconds for tokens, seconds in zip(row["tokens"], row["seconds"], strict=True)]
        cell = row["temperature"], row["clients"]
        expected = {"tokens_per_second": [median(rates)], "tokens_per_second_spread": [min(rates), max(rates)]}
        if row["decoding"] == "plain":
            plain[cell] = rates
        else:
            ratios = [rate / other for rate, other in zip(rates, plain[cell], strict=True)]
            expected |= {"speedups": ratios, "speedup": [median(ratios)], "speedup_spread": [min(ratios), max(ratios)]}
        for key, numbers in expected.items():
            kept = row[key] if isinstance(row[key], list) else [row[key]]
            hundredth = 5e-3 if key.startswith("tokens") else None  # 8.05 tok/s are kept with 3 digits, others with 4
            if kept != pytest.approx(numbers, rel=5e-4, abs=hundredth):
                yield row["decoding"], key


def test_every_result_is_registered_once() -> None:
    names = [name for one in registry.read() for name in one.files]
    assert sorted(names) == sorted(file.stem for file in RESULTS.glob("*.json"))


def test_table_of_results_is_current() -> None:
    written = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    assert registry.page(written) == written, "type: python -m benchmarks.registry"


@pytest.mark.parametrize("name", NAMES)
@needs_history
def test_result_was_measured_on_its_commit_and_not_edited_since(name: str) -> None:
    values = registry.kept(name)
    assert not [*wrong_commits(values)], "the code of this commit is not the code that ran"
    assert not [*edited(values, versions(name))], "measure again; a result is not edited"


@pytest.mark.parametrize("one", registry.read(), ids=lambda one: one.what)
def test_script_of_a_result_is_in_the_checkout(one: registry.Result) -> None:
    words = re.findall(r"benchmarks(?:\.\w+)+|(?:scripts|benchmarks)/[\w/]+\.sh", one.command)
    paths = [word if word.endswith(".sh") else f"{word.replace('.', '/')}.py" for word in words]
    assert all((ROOT / path).exists() for path in paths)


@pytest.mark.parametrize("old", [None, "needs a GPU"])
def test_stale_prints_results_of_older_code_and_fails_if_there_are_any(
    old: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = [registry.Result(what=what, link="", command="", files=(), where="", old=old) for what in ("a", "b")]
    monkeypatch.setattr(registry, "read", lambda: kept)
    code, printed = registry.main(["--stale"]), capsys.readouterr().out
    assert (code, printed) == ((1, "a: needs a GPU\nb: needs a GPU\n") if old else (0, ""))


@pytest.mark.parametrize("name", [name for name in NAMES if registry.kept(name).get("kind") == "bench serve"])
def test_served_speeds_are_medians_of_their_rounds(name: str) -> None:
    assert not [*wrong_medians(registry.kept(name))]
