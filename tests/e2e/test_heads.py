"""Every head served: output token for token the target's, and exactly the acceptance its numbers predict.

The prediction runs the head on hidden states of transformers, with transformers' lm_head where the head needs one, and
counts the drafts that greedy decoding accepts. Only a worker that reads the same states, binds the same lm_head and
computes the same conditionals counts the same.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.engine import TWO_RANKS, Call, Engine, Reply, run
from tests.support.models import make_head, make_target
from tests.support.predicted import predict
from tests.support.requests import ACCEPTED, ALL_DRAFTS

HEADS = {
    "linear": {},
    "shared": {"expander_rank": 16},
    "mlp": {"expander_layers": 2},
    "transformer": {"expander_layers": 2, "expander_heads": 4},
    "low rank": {"head": "shared", "expander_rank": 8, "component_rank": 8, "token_rank": 4},
}
WINDOW, LENGTH = 5, 24
PROMPTS = [[3, 9, 4], [7, 7, 1, 12, 5, 2], [8], [29, 2, 2, 19]]
GREEDY = {"temperature": 0.0, "max_tokens": LENGTH, "ignore_eos": True, "detokenize": False}
DRAFTS = "vllm:spec_decode_num_drafts"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads")
    target = make_target(folder / "target", vocab_size=30, seed=3)  # vLLM pads 30 to a multiple of 64
    for name, options in HEADS.items():
        make_head(folder / name, target, "btree", WINDOW, components=3, **{"head": name, **options})
    return folder


def engine(folder: Path, head: str | None, **arguments: object) -> Engine:
    if head:
        arguments["speculative_config"] = {"method": "mtpc", "model": str(folder / head), **ALL_DRAFTS}
    call = Call(PROMPTS, [GREEDY] * len(PROMPTS))
    return Engine(str(folder / "target"), [call], {"skip_tokenizer_init": True, "max_model_len": 64, **arguments})


def predicted(folder: Path, name: str, dtype: torch.dtype) -> tuple[int, int]:
    """(drafts accepted, steps with drafts) of greedy decoding, from transformers' hidden states."""
    steps = [one for made in predict(folder / "target", folder / name, PROMPTS, LENGTH, dtype) for one in made.steps]
    return sum(step.accepted for step in steps), len(steps)


def served_dtype() -> torch.dtype:
    """V1 on a CPU keeps a head's weights in bfloat16 where products of it are native."""
    return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32


def check(folder: Path, name: str, replies: dict[str, list[Reply]], dtype: torch.dtype) -> None:
    (plain,), (drafted,) = replies["plain"], replies[name]
    assert drafted.tokens == plain.tokens
    accepted, steps = predicted(folder, name, dtype)
    assert 0 < accepted < steps * (WINDOW - 1)  # drafts were accepted and rejected
    assert (drafted.metrics[ACCEPTED], drafted.metrics[DRAFTS]) == (accepted, steps)


@pytest.fixture(scope="module")
def on_v1(tiny: Path) -> dict[str, list[Reply]]:
    return run({"plain": engine(tiny, None), **{name: engine(tiny, name) for name in HEADS}}, "v1")


@pytest.mark.parametrize("name", HEADS)
def test_head_on_v1_accepts_predicted_drafts(tiny: Path, on_v1: dict[str, list[Reply]], name: str) -> None:
    check(tiny, name, {"plain": on_v1["plain"], name: on_v1[name]}, served_dtype())


def test_shared_head_on_v2_accepts_predicted_drafts(tiny: Path) -> None:
    replies = run({"plain": engine(tiny, None), "shared": engine(tiny, "shared")}, "v2", async_scheduling=True)
    check(tiny, "shared", replies, torch.float32)


def tensor_parallel(tiny: Path, on_v1: dict[str, list[Reply]], name: str) -> None:
    """Each rank has the logits of its part of the lm_head: of 30 tokens, filled up to 64, the second one has none."""
    divided = {"worker_extension_cls": "tests.support.workers.Divides"}
    two = run({name: engine(tiny, name, tensor_parallel_size=2, **divided)}, "v1", **TWO_RANKS)
    check(tiny, name, {"plain": on_v1["plain"], **two}, served_dtype())


@pytest.mark.feature("tensor parallel", "exact", "mtpc on V1")
def test_shared_head_on_two_ranks_accepts_predicted_drafts(tiny: Path, on_v1: dict[str, list[Reply]]) -> None:
    tensor_parallel(tiny, on_v1, "shared")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["low rank"])
def test_components_on_two_ranks_accept_predicted_drafts(tiny: Path, on_v1: dict[str, list[Reply]], name: str) -> None:
    tensor_parallel(tiny, on_v1, name)
