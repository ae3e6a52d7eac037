"""The workflows are YAML that GitHub reads, ask for no more rights than they need, and call scripts that are there."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
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
        yield from job.get("steps", [])


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
    own = [job for job in workflow["jobs"].values() if "uses" not in job]  # others are jobs of another workflow here
    assert all(job["runs-on"] and 0 < job["timeout-minutes"] <= 360 for job in own)
    text = (FOLDER / name).read_text(encoding="utf-8")
    used = re.findall(r"uses: (?!\./)(.+)", text)
    assert all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", one) for one in used), used


def test_what_starts_them() -> None:
    started = {name: set(read(name)["on"]) for name in CALLS}
    assert started["ci.yml"] == {"push", "pull_request", "workflow_call"} and started["release.yml"] == {"push"}
    assert started["gpu.yml"] == started["nightly.yml"] == {"schedule", "workflow_dispatch"}
    assert read("release.yml")["on"]["push"] == {"tags": ["v*"]}
    assert read("gpu.yml")["jobs"]["test"]["runs-on"] == ["self-hosted", "gpu"]


def test_release_is_published_after_all_tests_have_passed() -> None:
    jobs = read("release.yml")["jobs"]
    assert jobs["test"] == {"uses": "./.github/workflows/ci.yml"} and set(jobs["publish"]["needs"]) == {"test", "build"}


def test_ci_runs_every_python_of_the_cpu_build() -> None:
    job = read("ci.yml")["jobs"]["test"]
    assert job["strategy"]["matrix"] == {"python": ["3.11", "3.12", "3.13"]}
    assert {"python-version": "${{ matrix.python }}"} in [step.get("with") for step in job["steps"]]


@pytest.mark.parametrize(
    ("there", "installs"),
    [((), True), (("promtool",), True), (("chromedriver",), True), (("chromedriver", "promtool"), False)],
)
def test_ci_installs_browser_and_prometheus_when_one_is_absent(
    root: Path, tmp_path: Path, there: tuple[str, ...], installs: bool
) -> None:
    files = {"bin/apt-get": 'echo "$*" >>"$LOG"', "bin/id": "echo 0", "scripts/test.sh": "exit 7"}
    for place, text in {**files, **{f"bin/{name}": "" for name in there}}.items():
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / place).chmod(0o755)
    (tmp_path / "bin" / "dirname").symlink_to(shutil.which("dirname"))
    (tmp_path / ".ci").mkdir()
    shutil.copy(root / ".ci" / "run", tmp_path / ".ci")
    environment = {"PATH": str(tmp_path / "bin"), "LOG": str(tmp_path / "log")}
    done = subprocess.run(["/bin/bash", tmp_path / ".ci" / "run"], env=environment, capture_output=True, text=True)
    assert done.returncode == 7, done.stderr  # it ends with the tests
    assert (tmp_path / "log").exists() == installs


def test_a_release_is_of_its_tag(root: Path) -> None:
    """The step that compares them names the line that has the version."""
    (line,) = [step["run"] for step in steps(read("release.yml")) if "GITHUB_REF_NAME" in step.get("run", "")]
    pattern = shlex.split(line, comments=True)[2]
    versions = re.findall(r'^__version__ = "([^"]+)"$', (root / "vllm_mtpc/__init__.py").read_text(), re.MULTILINE)
    assert pattern.replace("${GITHUB_REF_NAME#v}", versions[0]) == f'__version__ = "{versions[0]}"'
