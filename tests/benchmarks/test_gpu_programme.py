"""benchmarks/gpu: failed parts are reported, every stage runs at toy size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import programme, stages
from benchmarks.gpu.programme import Part, Programme
from vllm_mtpc.engine import provenance

ROOT = Path(__file__).parents[2]


def part(name: str, code: str, **more: Any) -> Part:
    return Part(name, 1.0, [sys.executable, "-c", code], **more)


def test_failing_part_is_reported_and_the_next_part_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("MTPC_GPU_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setattr(provenance, "commit", lambda: "a" * 40)
    monkeypatch.setattr(provenance, "RESULTS", tmp_path / "results")  # without those of earlier runs
    out = tmp_path / "cache" / "result.json"
    write = f"open({str(out)!r}, 'w').write('{{\"rows\": [1], \"commit\": null}}')"
    parts = [
        part("bad", "print('begun'); raise ValueError('no such thing')"),
        part("without", "", needs=[tmp_path / "target"]),
        part("skipped", "print('3 skipped in 1 s')", proof=stages.PASSED),  # pytest ends with 0
        part("good", write, result=out, environment={"HERE": str(tmp_path)}),
    ]
    monkeypatch.setitem(stages.STAGES, "kernels", lambda programme: parts)
    assert programme.main(["kernels"]) == 1
    found = json.loads((tmp_path / "out" / "gpu-kernels.json").read_text())
    assert found["commit"] == "a" * 40 and {"hardware", "versions", "command"} <= found.keys()
    assert [values["state"] for values in found["parts"].values()] == ["failed"] * 3 + ["done"]
    bad, without, skipped, good = found["parts"].values()
    assert bad["reason"] == "exit code 1" and bad["log"][0] == "begun" and "no such thing" in bad["log"][-1]
    assert without["reason"].endswith("target is missing: run the stage that makes it first")
    assert skipped["reason"].startswith("nothing was compared")
    assert good["result"] == {"rows": [1]} and good["environment"] == {"HERE": tmp_path.name}
    assert good["command"].startswith("python -c ")
    assert "ValueError: no such thing" in capsys.readouterr().out


@pytest.mark.slow
def test_every_stage_runs_at_toy_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In their order: later stages need what earlier ones make."""
    monkeypatch.setenv("MTPC_GPU_CACHE", str(tmp_path))
    monkeypatch.delenv("OUT", raising=False)
    for stage, declared in stages.STAGES.items():
        if wanted := {one.name: one.result is not None for one in declared(Programme(True))}:
            command = ["benchmarks/gpu/run.sh", stage, "--toy", "--limit", "3000"]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
            parts = json.loads((tmp_path / f"gpu-{stage}.json").read_text())["parts"]
            assert {name: "result" in values for name, values in parts.items()} == wanted
