"""The workflows are YAML that GitHub reads, ask for no more rights than they need, and call scripts that are there."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).parents[1] / ".github" / "workflows"
CALLS = {
    "ci.yml": ".ci/run",
    "gpu.yml": "benchmarks/gpu/run.sh tests --limit 6600",
    "nightly.yml": "scripts/test.sh --all",
    "release.yml": "python -m build",
}


def read(name: str) -> dict[str, Any]:
    found = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
    found["on"] = found.pop(True)  # YAML 1.1 takes `on` for a truth
    return found


def steps(workflow: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for job in workflow["jobs"].values():
        yield from job["steps"]


def scripts(workflow: dict[str, Any]) -> set[str]:
    """Files of the checkout that the steps run."""
    words = [word for step in steps(workflow) for word in shlex.split(step.get("run", ""), comments=True)]
    return {word for word in words if re.fullmatch(r"[\w.]+(/[\w.]+)+", word) and not word.endswith(".py")}


def test_every_workflow_is_known() -> None:
    assert {path.name for path in FOLDER.iterdir()} == CALLS.keys()


@pytest.mark.parametrize("name", CALLS)
def test_a_workflow_calls_what_is_there(root: Path, name: str) -> None:
    workflow = read(name)
    assert CALLS[name] in [step.get("run") for step in steps(workflow)]
    for script in scripts(workflow):
        assert os.access(root / script, os.X_OK), script


@pytest.mark.parametrize("name", CALLS)
def test_rights_and_times_are_bounded(name: str) -> None:
    workflow = read(name)
    assert workflow["permissions"] == {"contents": "read"} and workflow["concurrency"]["group"]
    assert all(job["runs-on"] and 0 < job["timeout-minutes"] <= 360 for job in workflow["jobs"].values())
    assert all(re.search(r"@[\w./-]+$", step["uses"]) for step in steps(workflow) if "uses" in step)


def test_what_starts_them() -> None:
    started = {name: set(read(name)["on"]) for name in CALLS}
    assert started["ci.yml"] == {"push", "pull_request"} and started["release.yml"] == {"push"}
    assert started["gpu.yml"] == started["nightly.yml"] == {"schedule", "workflow_dispatch"}
    assert read("release.yml")["on"]["push"] == {"tags": ["v*"]}
    assert read("gpu.yml")["jobs"]["test"]["runs-on"] == ["self-hosted", "gpu"]


def test_a_release_is_of_its_tag(root: Path) -> None:
    """The step that compares them names the line that has the version."""
    (line,) = [step["run"] for step in steps(read("release.yml")) if "GITHUB_REF_NAME" in step.get("run", "")]
    pattern = shlex.split(line, comments=True)[2]
    versions = re.findall(r'^__version__ = "([^"]+)"$', (root / "vllm_mtpc/__init__.py").read_text(), re.MULTILINE)
    assert pattern.replace("${GITHUB_REF_NAME#v}", versions[0]) == f'__version__ = "{versions[0]}"'
