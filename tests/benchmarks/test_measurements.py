"""The benchmarks run at toy size and count what they claim to count."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import kernels, launches, sweep, synthetic, timing, train_cost, training
from tests.support.configs import engine_config
from tests.support.engine import Engine, ask, run
from tests.support.models import make_target
from vllm_mtpc.errors import MtpcError, UsageError
from vllm_mtpc.files import read_yaml
from vllm_mtpc.train.options import parse

RATES = [0.75, 0.5, 0.125]
TINY = training.Shape("tiny", vocab_size=23, hidden_size=16, window=4, components=2, windows=24, chunk=8)


@pytest.mark.parametrize("name", [*launches.SETTINGS, *launches.PASSES])
def test_draft_has_no_more_launches_and_bytes_than_before(name: str, root: Path) -> None:
    kept = json.loads((root / "benchmarks" / "results" / "launches.json").read_text())["rows"]
    (before,) = (row for row in kept if (row["head"], row["batch"]) == (name, 32))
    found = launches.measure(name, 32)
    assert all(found[key] <= before[key] for key in ("operations", "triton", "bytes", "flops"))
    assert min(found[key] for key in ("operations", "bytes", "flops")) > 0


def test_assumed_float32_share_reproduces_the_measured_step(root: Path) -> None:
    rows = json.loads((root / "benchmarks" / "results" / "training-cuda.json").read_text())["rows"]
    (row,) = (row for row in rows if row["shape"]["name"] == "subwords" and row["shape"]["chunk"] == 128)
    n, r, size, windows = 8, 8, 1024 * 32000, 128  # of that row: every component has its own row of the lm_head
    products = 2 * size * (3 * n * r + 2 * n) / (train_cost.FLOAT32_SHARE * train_cost.FLOAT32_FLOPS)
    logits = train_cost.LOGIT_PASSES * 4 * n * r * 32000 / (train_cost.MEMORY_SHARE * 4.8e12)  # bytes/s of an H200
    assert windows * (products + logits) == pytest.approx(row["seconds"][0], rel=0.05)


def test_sweep_trains_every_run_once(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    make_target(tmp_path / "target", 16, seed=1, hidden_size=32)
    lines = [{"prompt_ids": [1, 2], "response_ids": [(3 * i + k) % 16 for k in range(60)]} for i in range(8)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    common = {"target": str(tmp_path / "target"), "data": [str(tmp_path / "d.jsonl")], "window": 3, "device": "cpu"}
    common |= {"max_steps": 2, "windows_per_step": 16, "seq_len": 32}
    common |= {"evaluation_sequences": 4, "evaluation_tokens": 10}
    runs = {"circuit": {"circuit": "ff"}, "ptp": {"head": "ptp", "lora_rank": 2}}
    (tmp_path / "plan.yaml").write_text(json.dumps({"title": "PTP next to a circuit", "common": common, "runs": runs}))
    words = [str(tmp_path / "plan.yaml"), "--runs", str(tmp_path / "runs"), "--json", str(tmp_path / "table.json")]
    assert sweep.main(words) == 0
    rows = json.loads((tmp_path / "table.json").read_text())["rows"]
    for row, name in zip(rows, ("circuit", "ptp"), strict=True):
        record = json.loads((tmp_path / "runs" / name / "provenance.json").read_text())
        assert row["tokens_per_step"]["t1"] == record["figures"]["t1"]["tokens_per_step"]
    monkeypatch.setattr("vllm_mtpc.train.run.train", lambda options: pytest.fail("trained twice"))
    assert sweep.main(words) == 0
    assert sweep.main([*words, "--set", "evaluation_sequences=0"]) == 1
    assert "run circuit: evaluation_sequences 0 leaves nothing to tabulate" in capsys.readouterr().err


@pytest.mark.parametrize("changes", [{}, {"head": "shared"}, {"likelihood": True}])
def test_training_in_chunks_gives_the_numbers_of_one_piece(changes: dict) -> None:
    shape = replace(TINY, **changes)
    rows = [training.measure(way, "cpu") for way in training.ways(shape)]
    assert [row["shape"]["chunk"] for row in rows] == [8, 24] and rows[0]["losses"][0] > rows[0]["losses"][-1]
    training.check_agreement(shape.name, rows)
    wrong = {**rows[0], "losses": [1.001 * loss for loss in rows[0]["losses"]]}
    with pytest.raises(UsageError, match="losses differ"):
        training.check_agreement(shape.name, [rows[0], wrong])


def test_kernel_that_differs_from_its_definition_ends_the_benchmark(root: Path, monkeypatch, capsys) -> None:
    assert {file.parent.name for file in (root / "kernels").glob("*/kernel.py")} == set(kernels.OPERATIONS)
    monkeypatch.setitem(timing.COPIED, "cpu", 1 << 16)
    wrong = kernels.Case("T=1", naive=lambda: torch.zeros(2), moved=8, kernel=lambda: torch.tensor([0.0, 0.1]))
    monkeypatch.setitem(kernels.OPERATIONS, "uniform", lambda device: iter([wrong]))
    assert kernels.main(["--only", "uniform", "--repeats", "1"]) == 1
    assert "the kernel differs from its definition" in capsys.readouterr().err


@pytest.mark.parametrize("runner", ["v1", pytest.param("v2", marks=pytest.mark.slow)])
def test_synthetic_target_is_marked_and_accepts_drafts_as_prescribed(runner: str, tmp_path: Path) -> None:
    """On Model Runner V2: vLLM's CPU kernels of V1 have no prescribed acceptance."""
    words = ["--shape", "2x64", "--window", "4", "--components", "3", "--max-model-len", "256"]
    assert synthetic.main([*words, "--acceptance", *map(str, RATES), "--out", str(tmp_path)]) == 0
    for file in ("SYNTHETIC-head/README.md", "SYNTHETIC-target/README.md", "SYNTHETIC-target/config.json"):
        assert "SYNTHETIC" in (tmp_path / file).read_text()
    given = synthetic.arguments(tmp_path, RATES)
    if runner == "v1":
        with pytest.raises(MtpcError, match="'synthetic' on Model Runner V1"):
            engine_config(Path(given["model"]), given["speculative_config"], load_format="dummy")
        return
    prompts = [[1, 2, 3 + index] for index in range(8)]
    engine = Engine(given.pop("model"), [ask(prompts, 60, temperature=1.0)], {**given, "max_model_len": 128})
    (reply,) = run({"synthetic": engine}, runner)["synthetic"]
    assert reply.steps > 150
    for rate, count in zip(RATES, reply.metrics["per_position"], strict=True):
        # 4 standard deviations of a share of so many steps: 0.12 to 0.16
        assert abs(count / reply.steps - rate) < 4 * (rate * (1 - rate) / reply.steps) ** 0.5, (rate, count)


PLANS = sorted({*Path("benchmarks").glob("*.yaml")} - {Path("benchmarks/registry.yaml")})


@pytest.mark.parametrize("file", PLANS, ids=lambda file: file.stem)
def test_options_of_kept_plans_are_accepted(root: Path, file: Path) -> None:
    plan = read_yaml(root / file)
    for changed in plan["runs"].values() if "runs" in plan else [{}]:
        parse({**plan.get("common", plan), "out": Path("head"), **(changed or {})})
