"""Every head served: output token for token the target's, and exactly the acceptance its numbers predict.

The prediction runs the head on hidden states of transformers, with transformers' lm_head where the head needs one, and
counts the drafts that greedy decoding accepts. Only a worker that reads the same states, binds the same lm_head and
computes the same conditionals counts the same.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.engine import Call, Engine, Reply, run
from tests.support.models import make_head, make_target
from tests.support.predicted import predict

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
ACCEPTED, DRAFTS = "vllm:spec_decode_num_accepted_tokens", "vllm:spec_decode_num_drafts"
EVERY_DRAFT = {"num_speculative_tokens_per_batch_size": "off", "min_survival": 0}  # drafts are counted below


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads")
    target = make_target(folder / "target", vocab_size=30, seed=3)  # vLLM pads 30 to a multiple of 64
    for name, options in HEADS.items():
        make_head(folder / name, target, "btree", WINDOW, components=3, **{"head": name, **options})
    return folder


def engine(folder: Path, head: str | None, **arguments: object) -> Engine:
    if head:
        arguments["speculative_config"] = {"method": "mtpc", "model": str(folder / head), **EVERY_DRAFT}
    call = Call(PROMPTS, [GREEDY] * len(PROMPTS))
    return Engine(str(folder / "target"), [call], {"skip_tokenizer_init": True, "max_model_len": 64, **arguments})


def predicted(folder: Path, name: str, dtype: torch.dtype) -> tuple[int, int]:
    """(drafts accepted, steps with drafts) of greedy decoding, from transformers' hidden states."""
    steps = [one for made in predict(folder / "target", folder / name, PROMPTS, LENGTH, dtype) for one in made.steps]
    return sum(step.accepted for step in steps), len(steps)


def served_dtype() -> torch.dtype:
    """V1 on a CPU keeps a head's weights in bfloat16 where products of it are native."""
    return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32


def check(folder: Path, name: str, replies: dict[str, list[Reply] | str], dtype: torch.dtype) -> None:
    for reply in replies.values():
        assert not isinstance(reply, str), reply
    (plain,), (drafted,) = replies["plain"], replies[name]
    assert drafted.tokens == plain.tokens
    accepted, steps = predicted(folder, name, dtype)
    assert 0 < accepted < steps * (WINDOW - 1)  # drafts were accepted and rejected
    assert (drafted.metrics[ACCEPTED], drafted.metrics[DRAFTS]) == (accepted, steps)


@pytest.fixture(scope="module")
def on_v1(tiny: Path) -> dict[str, list[Reply] | str]:
    return run({"plain": engine(tiny, None), **{name: engine(tiny, name) for name in HEADS}}, "v1")


@pytest.mark.parametrize("name", HEADS)
def test_served_on_v1(tiny: Path, on_v1: dict[str, list[Reply] | str], name: str) -> None:
    check(tiny, name, {"plain": on_v1["plain"], name: on_v1[name]}, served_dtype())


def test_shared_on_v2(tiny: Path) -> None:
    replies = run({"plain": engine(tiny, None), "shared": engine(tiny, "shared")}, "v2", async_scheduling=True)
    check(tiny, "shared", replies, torch.float32)


def tensor_parallel(tiny: Path, on_v1: dict[str, list[Reply] | str], name: str) -> None:
    """Each rank has the logits of its part of the lm_head: of 30 tokens, filled up to 64, the second one has none."""
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "TORCHDYNAMO_DISABLE": "1"}
    divided = {"worker_extension_cls": "tests.support.faults.divided.Divides"}
    two = run({name: engine(tiny, name, tensor_parallel_size=2, **divided)}, "v1", **environment)
    check(tiny, name, {"plain": on_v1["plain"], **two}, served_dtype())


@pytest.mark.feature("tensor parallel", "exact", "mtpc on V1")
def test_shared_tensor_parallel(tiny: Path, on_v1: dict[str, list[Reply] | str]) -> None:
    tensor_parallel(tiny, on_v1, "shared")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["low rank"])
def test_components_tensor_parallel(tiny: Path, on_v1: dict[str, list[Reply] | str], name: str) -> None:
    tensor_parallel(tiny, on_v1, name)
