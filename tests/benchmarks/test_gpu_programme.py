"""benchmarks/gpu: finished parts are kept, failed parts are reported, every stage runs at toy size."""

from __future__ import annotations

import json
import signal
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
    return tmp_path


def ran(monkeypatch: pytest.MonkeyPatch, parts: list[Part], *words: str) -> int:
    monkeypatch.setitem(stages.STAGES, "kernels", lambda programme: parts)
    return programme.main(["kernels", *words])


def kept(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "out" / "gpu-kernels.json").read_text())


def test_failing_part_is_reported_and_the_next_part_runs(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    out = folder / "cache" / "result.json"
    write = f"open({str(out)!r}, 'w').write('{{\"rows\": [1], \"commit\": null}}')"
    parts = [
        part("bad", "print('begun'); raise ValueError('no such thing')"),
        part("without", "", needs=[folder / "target"]),
        part("good", write, result=out, environment={"HERE": str(folder)}),
    ]
    assert ran(monkeypatch, parts) == 1
    found = kept(folder)
    assert found["commit"] == "a" * 40 and {"hardware", "versions", "command"} <= found.keys()
    states = {name: values["state"] for name, values in found["parts"].items()}
    assert states == {"bad": "failed", "without": "failed", "good": "done"}
    bad, without, good = found["parts"].values()
    assert bad["reason"] == "exit code 1" and bad["log"][0] == "begun" and "no such thing" in bad["log"][-1]
    assert without["reason"].endswith("target is missing: run the stage that makes it first")
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


def test_part_that_skips_every_test_has_failed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest ends with 0 where every test was skipped."""
    (folder / "test_it.py").write_text("import pytest\n\ndef test_it():\n    pytest.skip('no GPU')\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder / "test_it.py")]
    assert ran(monkeypatch, [Part("tests", 1.0, command, proof=stages.PASSED)]) == 1
    assert kept(folder)["parts"]["tests"]["reason"].startswith("nothing was compared")
    (folder / "test_it.py").write_text("def test_it():\n    pass\n")
    assert ran(monkeypatch, [Part("tests", 1.0, command, proof=stages.PASSED)]) == 0
    on_gpu = [part for part in stages.tests(Programme(is_toy=False)) if "pytest" in part.command]
    assert on_gpu and all(part.proof == stages.PASSED for part in on_gpu)


def test_selected_tests_exist() -> None:
    words = {
        word for part in stages.tests(Programme(is_toy=False)) for word in part.command if word.startswith("tests/")
    }
    assert len(words) > 10
    for word in words:
        file, _, name = word.partition("::")
        function, _, case = name.partition("[")
        assert (ROOT / file).exists(), word
        assert not function or f"def {function}(" in (ROOT / file).read_text(encoding="utf-8"), word
        assert not case or case.removesuffix("]") in CASES, word


def test_stopped_stage_resumes_at_the_stopped_part(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call is ended by SIGTERM inside its second part, which finds what it had left."""
    log = folder / "log"
    noted = f"open({str(log)!r}, 'a').write('%s')"
    again = f"import os, signal, time; n = open({str(log)!r}).read().count('b'); {noted % 'b'}"
    again += "; n or (os.kill(os.getppid(), signal.SIGTERM), time.sleep(60))"
    parts = [part("a", noted % "a"), part("b", again), part("c", noted % "c")]
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with pytest.raises(SystemExit):
            ran(monkeypatch, parts)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert log.read_text() == "ab" and list(kept(folder)["parts"]) == ["a"]
    assert ran(monkeypatch, parts) == 0 and log.read_text() == "abbc"
    engine = '{"compilation_config": {"mode": 0}}'  # other arguments of the engines are another measurement
    assert ran(monkeypatch, parts, "--engine", engine) == 0 and log.read_text() == "abbcabc"
    assert ran(monkeypatch, parts, "--engine", engine) == 0 and log.read_text() == "abbcabc"


def test_engine_arguments_reach_every_engine(folder: Path) -> None:
    """Where inductor fails on a GPU: `--engine '{"enforce_eager": true}'`."""
    on_gpu = Programme(is_toy=False, engine={"enforce_eager": True})
    for part in (part for stage in stages.STAGES for part in stages.STAGES[stage](on_gpu)):
        if {"regenerate", "serve"} & set(part.command):
            assert json.loads(part.command[part.command.index("--engine") + 1])["enforce_eager"] is True, part.name


def test_part_that_exceeds_the_limit_is_stopped(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    parts = [part("long", "", seconds=99), part("hangs", "import time; print('now', flush=True); time.sleep(99)")]
    assert ran(monkeypatch, parts, "--limit", "3") == 1
    found = kept(folder)["parts"]
    assert list(found) == ["hangs"] and found["hangs"]["reason"].startswith("stopped after ")
    assert found["hangs"]["log"] == ["now"] and found["hangs"]["seconds"] < 30
    assert "no time for long" in capsys.readouterr().out


def test_stopped_part_leaves_no_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine lives in a session of its own, and a GPU's memory with it."""
    pid = folder / "pid"
    child = "[sys.executable, '-c', 'import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(99)']"
    code = f"import subprocess, sys, time; p = subprocess.Popen({child}, start_new_session=True)"
    code += f"; open({str(pid)!r}, 'w').write(str(p.pid)); time.sleep(99)"
    monkeypatch.setattr(programme, "GRACE_S", 0.5)
    assert ran(monkeypatch, [part("engine", code)], "--limit", "3") == 1
    assert not psutil.pid_exists(int(pid.read_text())) or psutil.Process(int(pid.read_text())).status() == "zombie"


@pytest.mark.parametrize("stage", stages.STAGES)
def test_parts_have_unique_names_and_fit_the_limit(stage: str) -> None:
    for is_toy in (False, True):
        parts = stages.STAGES[stage](Programme(is_toy))
        assert len({one.name for one in parts}) == len(parts) > 0
        assert all(0 < one.seconds <= programme.LIMIT_S for one in parts)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("toy")


NEEDS = {
    "heads": ["target"],
    "tokens": ["target"],
    "serve": ["target", "heads"],
    "ptp": ["target"],
    "paper": ["target", "heads"],
    "drafters": ["target"],
}


@pytest.mark.slow
@pytest.mark.parametrize("stage", stages.STAGES)
def test_every_stage_runs_at_toy_size(stage: str, toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTPC_GPU_CACHE", str(toy))
    monkeypatch.delenv("OUT", raising=False)
    for one in (*NEEDS.get(stage, ()), stage):  # an earlier test has run it already, or it runs now
        command = ["benchmarks/gpu/run.sh", one, "--toy", "--limit", "3000"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    parts = json.loads((toy / f"gpu-{stage}.json").read_text())["parts"]
    wanted = {one.name: one.result is not None for one in stages.STAGES[stage](Programme(True))}
    assert {name: "result" in values for name, values in parts.items()} == wanted
