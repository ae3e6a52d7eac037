"""What the benchmarks count and compute is what their tables say; options of kept plans are accepted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from benchmarks import launches, train_cost
from benchmarks.demo import byte_target
from vllm_mtpc.files import read_yaml
from vllm_mtpc.train.options import parse

OTHERS = ("registry.yaml", "support.yaml")
PLANS = sorted(file for file in Path("benchmarks").glob("*.yaml") if file.name not in OTHERS)


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


@pytest.mark.parametrize("file", PLANS, ids=lambda file: file.stem)
def test_options_of_kept_plans_are_accepted(root: Path, file: Path) -> None:
    plan = read_yaml(root / file)
    for changed in (plan.get("runs") or plan["cells"]).values():
        options = {name: value for name, value in (changed or {}).items() if name != "apart"}  # the grid's own
        parse({"data": ["text"], **plan["common"], "out": Path("head"), **options})


@torch.no_grad()
def test_pruned_target_is_as_near_to_its_teacher_as_its_neurons_allow() -> None:
    torch.manual_seed(0)
    teacher = LlamaForCausalLM(byte_target.target_config(2, 64, 32)).eval()
    tokens, unseen = torch.randint(0, 256, (2, 8, 64)).unbind(0)

    def distance(neurons: int) -> torch.Tensor:
        copy = byte_target.prune(teacher, neurons, tokens).eval()
        assert copy.config.intermediate_size == neurons == copy.model.layers[1].mlp.up_proj.weight.shape[0]
        return (copy(unseen).logits - teacher(unseen).logits).square().mean()

    least = distance(16)
    assert distance(64) < 1e-3 * least  # damping of the least squares
    assert distance(48) < least < distance(4)
    for layer in teacher.model.layers:  # those without effect go first
        layer.mlp.down_proj.weight[:, ::2] = 0
    assert distance(32) < 1e-3 * least
    for layer in teacher.model.layers:  # what others do as well is left to them
        for linear in (layer.mlp.gate_proj, layer.mlp.up_proj):
            linear.weight[::2] = linear.weight[1::2]
        layer.mlp.down_proj.weight[:, ::2] = 0.3 * layer.mlp.down_proj.weight[:, 1::2].flip(1)
    assert distance(32) < 1e-3 * least
