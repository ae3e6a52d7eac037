"""Result files: measured on the commits that they name, not edited since, with the medians of their rounds."""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from statistics import median
from typing import Any

import pytest

from benchmarks import registry
from vllm_mtpc.engine import provenance
from vllm_mtpc.engine.provenance import CHANGED, FOLDERS, RESULTS, ROOT

NAMES = sorted(file.stem for file in RESULTS.glob("*.json"))
UNKNOWN = {"losses", "shakespeare", "shakespeare-nll", "training-cuda", "tokens-cpu"}  # the commit is not the code


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
            if kept != pytest.approx(numbers, rel=5e-4):  # rounded to 4 digits
                yield row["decoding"], key


@pytest.mark.parametrize("name", NAMES)
@needs_history
def test_result_was_measured_on_its_commit_and_not_edited_since(name: str) -> None:
    values = registry.kept(name)
    if name not in UNKNOWN:
        assert not [*wrong_commits(values)], "the code of this commit is not the code that ran"
    assert not [*edited(values, versions(name))], "measure again; a result is not edited"


def test_results_of_unknown_code_are_no_more_than_these() -> None:
    found = {name for name in NAMES if any(CHANGED in commit for commit in registry.trees_of(registry.kept(name)))}
    assert found == UNKNOWN, "remove a result that was measured again; no result may be added"


@pytest.mark.parametrize("name", [name for name in NAMES if registry.kept(name).get("kind") == "bench serve"])
def test_served_speeds_are_medians_of_their_rounds(name: str) -> None:
    assert not [*wrong_medians(registry.kept(name))]


def at_head(values: Any) -> None:
    values["commit"] = git("rev-parse", "HEAD")


def at_head_in_part(values: Any) -> None:
    values["cases"]["late"]["commit"] = git("rev-parse", "HEAD")


def without_proposers(values: Any) -> None:
    del values["trees"]["proposers"]


def without_hashes(values: Any) -> None:
    del values["trees"]


def of_other_kernels(values: Any) -> None:
    values["trees"]["kernels"] = "0" * 40


def without_the_run_of_a_pass(values: Any) -> None:
    del values["runs"][0]


FALSE_COMMITS: list[tuple[str, Callable[[Any], None]]] = [
    ("serve-demo-cpu", at_head),
    ("distribution-v2", at_head_in_part),
    ("serve-demo-cpu", without_proposers),
    ("serve-demo-cpu", without_hashes),
    ("gpu-kernels", of_other_kernels),
    ("tests-all", without_the_run_of_a_pass),
]


@pytest.mark.parametrize(("name", "falsify"), FALSE_COMMITS)
@needs_history
def test_false_commit_is_found(name: str, falsify: Callable[[Any], None]) -> None:
    values = copy.deepcopy(registry.kept(name))
    assert not [*wrong_commits(values)]
    falsify(values)
    assert [*wrong_commits(values)]


def median_alone(values: Any) -> None:
    values["rows"][1]["speedup"] += 0.1


def all_of_a_row(values: Any) -> None:
    row = values["rows"][1]
    row["seconds"] = [second / 1.1 for second in row["seconds"]]
    row["tokens_per_second"] *= 1.1
    row["speedup"] *= 1.1


def tokens_per_step(values: Any) -> None:
    values["rows"][1]["tokens_per_step"] = 3.2


@pytest.mark.parametrize("falsify", [median_alone, all_of_a_row, tokens_per_step, at_head])
@needs_history
def test_edited_result_is_found_whatever_its_page_shows(falsify: Callable[[Any], None]) -> None:
    values = copy.deepcopy(registry.kept("serve-demo-cpu"))
    falsify(values)
    assert [*edited(values, versions("serve-demo-cpu"))]
    assert bool([*wrong_medians(values)]) == (falsify in (median_alone, all_of_a_row))


def test_pass_of_older_code_makes_the_kept_run_stale() -> None:
    values = copy.deepcopy(registry.kept("tests-all"))
    now = {"commit": values["commit"], "trees": provenance.collect("tests")["trees"]}
    entries = [one for kinds in values["tests"].values() for one in kinds.values()] + values["cells"]
    for one in entries:
        one["commit"] = values["commit"]
    values |= now | {"runs": []}
    assert not registry.stale(values)
    entries[0]["commit"] = "a" * 40
    assert registry.stale(values) == ["a" * 40] and [*wrong_commits(values)]
    values["runs"] = [{"commit": "a" * 40, "trees": now["trees"] | {"kernels": "0" * 40}}]
    assert registry.stale(values) == ["a" * 40]
    assert {*registry.measured_on(values)} == {values["commit"], "a" * 40}
