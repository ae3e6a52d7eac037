"""benchmarks/gpu: finished parts are kept, failed parts are reported, every stage runs at toy size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.gpu import programme, stages
from benchmarks.gpu.programme import Part, Programme
from tests.support.distribution_cases import CASES
from vllm_mtpc.engine import provenance

ROOT = Path(__file__).parents[2]


def part(name: str, code: str, seconds: float = 1.0, **more: Any) -> Part:
    return Part(name, seconds, [sys.executable, "-c", code], **more)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MTPC_GPU_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setattr(provenance, "commit", lambda: "a" * 40)
    monkeypatch.setattr(provenance, "RESULTS", tmp_path / "results")  # without those of earlier runs
    return tmp_path


def ran(monkeypatch: pytest.MonkeyPatch, parts: list[Part], *words: str) -> int:
    monkeypatch.setitem(stages.STAGES, "kernels", lambda programme: parts)
    return programme.main(["kernels", *words])


def kept(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "out" / "gpu-kernels.json").read_text())


def test_failing_part_is_reported_and_the_next_part_runs(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    out = folder / "cache" / "result.json"
    write = f"open({str(out)!r}, 'w').write('{{\"rows\": [1], \"commit\": null}}')"
    parts = [part("bad", "print('begun'); raise ValueError('no such thing')")]
    parts.append(part("without", "", needs=[folder / "target"]))
    parts.append(part("skipped", "print('3 skipped in 1 s')", proof=stages.PASSED))  # pytest ends with 0
    parts.append(part("good", write, result=out, environment={"HERE": str(folder)}))
    assert ran(monkeypatch, parts) == 1
    found = kept(folder)
    assert found["commit"] == "a" * 40 and {"hardware", "versions", "command"} <= found.keys()
    assert [values["state"] for values in found["parts"].values()] == ["failed"] * 3 + ["done"]
    bad, without, skipped, good = found["parts"].values()
    assert bad["reason"] == "exit code 1" and bad["log"][0] == "begun" and "no such thing" in bad["log"][-1]
    assert without["reason"].endswith("target is missing: run the stage that makes it first")
    assert skipped["reason"].startswith("nothing was compared")
    assert good["result"] == {"rows": [1]} and good["environment"] == {"HERE": folder.name}
    assert good["command"].startswith("python -c ")
    assert "ValueError: no such thing" in capsys.readouterr().out


def test_finished_parts_are_not_run_again_on_the_same_commit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = folder / "count"
    code = f"open({str(count)!r}, 'a').write('%s')"
    parts = [part("fails", (code % "f") + "; raise SystemExit(3)"), part("good", code % "g")]
    assert ran(monkeypatch, parts) == 1 and count.read_text() == "fg"
    parts.append(part("new", code % "n"))
    assert ran(monkeypatch, parts) == 1 and count.read_text() == "fgnf"  # what failed comes last
    (folder / "cache" / "gpu-kernels.json").unlink()  # another machine, given the results so far
    assert ran(monkeypatch, parts) == 1 and count.read_text() == "fgnff"
    assert ran(monkeypatch, parts, "good") == 0 and count.read_text() == "fgnff"
    monkeypatch.setattr(provenance, "commit", lambda: "b" * 40)
    assert ran(monkeypatch, parts, "good") == 0 and count.read_text() == "fgnffg"
    commits = {name: values["commit"][0] for name, values in kept(folder)["parts"].items()}
    assert commits == {"fails": "a", "good": "b", "new": "a"}
    for engine in (["--engine", '{"enforce_eager": true}'],) * 2:  # another engine is another measurement
        assert ran(monkeypatch, parts, "good", *engine) == 0 and count.read_text() == "fgnffgg"


def test_selected_tests_exist() -> None:
    parts = stages.tests(Programme(is_toy=False))
    assert all(part.proof == stages.PASSED for part in parts if "pytest" in part.command)
    words = [word for part in parts for word in part.command]
    assert sum(word.startswith("tests/") for word in words) > 10
    for word in (word for word in words if word.startswith("tests/")):
        file, _, name = word.partition("::")
        function, _, case = name.partition("[")
        assert (ROOT / file).exists(), word
        assert not function or f"def {function}(" in (ROOT / file).read_text(encoding="utf-8"), word
        assert not case or case.removesuffix("]") in CASES, word


def test_part_that_exceeds_the_limit_is_stopped_with_its_processes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """An engine lives in a session of its own, and a GPU's memory with it."""
    pid = folder / "pid"
    child = "[sys.executable, '-c', 'import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(99)']"
    code = f"import subprocess, sys, time; p = subprocess.Popen({child}, start_new_session=True)"
    code += f"; open({str(pid)!r}, 'w').write(str(p.pid)); print('now', flush=True); time.sleep(99)"
    monkeypatch.setattr(programme, "GRACE_S", 0.5)
    assert ran(monkeypatch, [part("long", "", seconds=99), part("hangs", code)], "--limit", "3") == 1
    found = kept(folder)["parts"]
    assert list(found) == ["hangs"] and found["hangs"]["reason"].startswith("stopped after ")
    assert found["hangs"]["log"] == ["now"] and found["hangs"]["seconds"] < 30
    assert "no time for long" in capsys.readouterr().out
    assert not psutil.pid_exists(int(pid.read_text())) or psutil.Process(int(pid.read_text())).status() == "zombie"


@pytest.mark.parametrize("stage", stages.STAGES)
def test_parts_have_unique_names_fit_the_limit_and_get_the_engine_arguments(stage: str) -> None:
    """Where inductor fails on a GPU: `--engine '{"enforce_eager": true}'`."""
    for is_toy in (False, True):
        parts = stages.STAGES[stage](Programme(is_toy, {"enforce_eager": True}))
        assert len({one.name for one in parts}) == len(parts) > 0
        for one in parts:
            assert 0 < one.seconds <= programme.LIMIT_S
            if {"regenerate", "serve"} & set(one.command):
                assert json.loads(one.command[one.command.index("--engine") + 1])["enforce_eager"] is True, one.name


@pytest.mark.slow
def test_every_stage_runs_at_toy_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In their order: later stages need what earlier ones make."""
    monkeypatch.setenv("MTPC_GPU_CACHE", str(tmp_path))
    monkeypatch.delenv("OUT", raising=False)
    for stage, declared in stages.STAGES.items():
        command = ["benchmarks/gpu/run.sh", stage, "--toy", "--limit", "3000"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        parts = json.loads((tmp_path / f"gpu-{stage}.json").read_text())["parts"]
        wanted = {one.name: one.result is not None for one in declared(Programme(True))}
        assert {name: "result" in values for name, values in parts.items()} == wanted
