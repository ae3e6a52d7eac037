"""Drafts with the model split over two processes: the text and the drafts are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engine import TWO_RANKS, Engine, ask, build, run, run_with_plain
from tests.support.models import make_head, make_ptp_head, make_target
from tests.support.requests import ON
from vllm_mtpc.checkpoint import save_head
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.heads import build_head
from vllm_mtpc.heads.init import init_from_lm_head
from vllm_mtpc.heads.linear import SHARD_BYTES

pytestmark = pytest.mark.slow
PROMPTS = [[3, 9, 4], [7, 7, 1, 12, 5, 2], [8]]
TENSOR, PIPELINE = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two targets with heads; "large": unembeddings of a size that is divided over ranks, unevenly."""
    folder = tmp_path_factory.mktemp("parallel")
    target = make_target(folder / "small" / "target", vocab_size=32, seed=3)
    make_head(folder / "small" / "mtpc", target, "btree", window=5, components=3)
    make_ptp_head(folder / "small" / "ptp", target, "o-ptp", window=4)
    target = make_target(folder / "large" / "target", vocab_size=517, seed=3)
    sizes = {"circuit": "cp", "window": 8, "num_components": 32, "head": "linear"}
    config = HeadConfig.create(**sizes, target=target.config, verifier="../target")
    torch.manual_seed(0)
    head = build_head(config)
    init_from_lm_head(head, target.lm_head.weight.detach(), seed=0)
    assert head.leaf_weight.numel() * torch.bfloat16.itemsize >= SHARD_BYTES["cpu"]
    save_head(folder / "large" / "mtpc", config, head, {"command": "tests"}, "made by a test", torch.float32)
    return folder


def engine(place: Path, spec: dict[str, Any], **arguments: Any) -> Engine:
    calls = [ask(PROMPTS, 24), ask(PROMPTS, 24, temperature=1.0, seed=11)]
    return build(place, spec["method"], calls, spec=spec, **arguments)


MTPC, MERGED = {"method": "mtpc"}, {"method": "ptp", "draft_pass": "merged", "max_aux_rows": 64}
TP, PP = pytest.mark.feature("tensor parallel", "exact"), pytest.mark.feature("pipeline parallel", "exact")


@pytest.mark.parametrize(
    ("models", "options", "runner", "ranks"),
    [
        pytest.param("small", MTPC, "v1", TENSOR, marks=[TP, ON["mtpc on V1"]]),
        pytest.param("small", MTPC, "v2", TENSOR, marks=[TP, ON["mtpc on V2"]]),
        pytest.param("small", MTPC, "v2", PIPELINE, marks=[PP, ON["mtpc on V2"]]),
        pytest.param("large", MTPC, "v1", TENSOR, marks=[TP, ON["mtpc on V1"]], id="divided unembeddings, v1"),
        pytest.param("large", MTPC, "v2", TENSOR, marks=[TP, ON["mtpc on V2"]], id="divided unembeddings, v2"),
        pytest.param("small", MERGED, "v2", TENSOR, marks=[TP, ON["ptp on V2"]], id="ptp merged"),
        pytest.param(
            "small", {**MERGED, "draft_pass": "two-pass"}, "v2", TENSOR, marks=[TP, ON["ptp on V2"]], id="ptp two-pass"
        ),
    ],
)
def test_two_processes_write_the_text_of_one(folder: Path, models: str, options: Any, runner: str, ranks: Any) -> None:
    """Seeded requests too: every rank drew the same drafts."""
    place = folder / models
    one, plain = run_with_plain(engine(place, options), runner)
    two = run({"drafted": engine(place, options, **ranks)}, runner, **TWO_RANKS)["drafted"]
    assert two[0].tokens == one[0].tokens == plain[0].tokens
    assert two[1].tokens == one[1].tokens
    assert two[0].accepted > 0
