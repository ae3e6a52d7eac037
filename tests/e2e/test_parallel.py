"""Drafts with the model split over two processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.engine import Call, Engine, run
from tests.support.models import make_head, make_ptp_head, make_target
from vllm_mtpc.checkpoint import save_head
from vllm_mtpc.config.mtpc import HeadConfig
from vllm_mtpc.heads import build_head
from vllm_mtpc.heads.linear import SHARD_BYTES

PROMPTS = [[3, 9, 4], [7, 7, 1, 12, 5, 2], [8]]
RUNNERS = [pytest.param(name.lower(), marks=pytest.mark.column(f"mtpc on {name}")) for name in ("V1", "V2")]
GREEDY = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, "detokenize": False}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("parallel")
    target = make_target(folder / "target", vocab_size=32, seed=3)
    make_head(folder / "btree", target, "btree", window=5, components=3)
    return folder


def engine(folder, with_head: bool, **arguments) -> Engine:
    if with_head:
        arguments["speculative_config"] = {"method": "mtpc", "model": str(folder / "btree")}
    sampled = {**GREEDY, "temperature": 1.0, "seed": 11}
    calls = [Call(PROMPTS, [GREEDY] * 3), Call(PROMPTS, [sampled] * 3)]
    return Engine(str(folder / "target"), calls, {"skip_tokenizer_init": True, "max_model_len": 64, **arguments})


def compare(folder, runner: str, **arguments) -> None:
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "TORCHDYNAMO_DISABLE": "1"}
    two = run(
        {"plain": engine(folder, False, **arguments), "drafted": engine(folder, True, **arguments)},
        runner,
        async_scheduling=runner == "v2",
        **environment,
    )
    one = run(
        {"plain": engine(folder, False), "drafted": engine(folder, True)}, runner, async_scheduling=runner == "v2"
    )
    for replies in (*one.values(), *two.values()):
        assert not isinstance(replies, str), replies
    assert two["drafted"][0].tokens == two["plain"][0].tokens == one["plain"][0].tokens
    # a seeded request says the same on one rank and on two: every rank drew the same drafts
    assert two["drafted"][1].tokens == one["drafted"][1].tokens
    assert two["drafted"][0].metrics["vllm:spec_decode_num_accepted_tokens"] > 0


@pytest.mark.feature("tensor parallel", "exact", "mtpc on V1")
@pytest.mark.slow
def test_tensor_parallel_v1(tiny) -> None:
    compare(tiny, "v1", tensor_parallel_size=2)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory):
    """A head whose unembeddings are divided over ranks, unevenly: every component begins at the target's lm_head."""
    folder = tmp_path_factory.mktemp("large")
    target = make_target(folder / "target", vocab_size=517, seed=3)
    config = HeadConfig.create(
        circuit="cp", window=8, num_components=32, target=target.config, verifier="../target", head="linear"
    )
    torch.manual_seed(0)
    head = build_head(config)
    head.init_from_lm_head(target.lm_head.weight.detach(), seed=0)
    assert head.leaf_weight.numel() * torch.bfloat16.itemsize >= SHARD_BYTES["cpu"]
    save_head(folder / "btree", config, head, {"command": "tests"}, "made by a test", torch.float32)
    return folder


@pytest.mark.feature("tensor parallel", "exact")
@pytest.mark.slow
@pytest.mark.parametrize("runner", RUNNERS)
def test_divided_unembeddings(large, runner: str) -> None:
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "TORCHDYNAMO_DISABLE": "1"}
    use_async = runner == "v2"
    divided = run({"divided": engine(large, True, tensor_parallel_size=2)}, runner, use_async, **environment)["divided"]
    one = run({"plain": engine(large, False), "drafted": engine(large, True)}, runner, use_async)
    assert not isinstance(divided, str), divided
    assert divided[0].tokens == one["drafted"][0].tokens == one["plain"][0].tokens
    assert divided[1].tokens == one["drafted"][1].tokens, "seeded requests: the same drafts from divided weights"
    assert divided[1].metrics["vllm:spec_decode_num_accepted_tokens"] > 0


@pytest.mark.feature("tensor parallel", "exact", "mtpc on V2")
@pytest.mark.slow
def test_tensor_parallel_v2(tiny) -> None:
    compare(tiny, "v2", tensor_parallel_size=2)


@pytest.mark.feature("pipeline parallel", "exact", "mtpc on V2")
@pytest.mark.slow
def test_pipeline_parallel_v2(tiny) -> None:
    compare(tiny, "v2", pipeline_parallel_size=2)


@pytest.mark.feature("tensor parallel", "exact")
@pytest.mark.slow
@pytest.mark.parametrize("runner", RUNNERS)
def test_ranks_are_held_to_the_same_drafts(tiny, runner: str) -> None:
    """MTPC_DEBUG=1: a rank that drafts something else ends the engine; ranks that agree change nothing."""
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "TORCHDYNAMO_DISABLE": "1", "MTPC_DEBUG": "1"}
    injected = {"worker_extension_cls": "tests.support.faults.rank.Differs"}
    engines = {
        "sound": engine(tiny, True, tensor_parallel_size=2),
        "injected": engine(tiny, True, tensor_parallel_size=2, **injected),
    }
    replies = run(engines, runner, async_scheduling=runner == "v2", **environment)
    assert not isinstance(replies["sound"], str), replies["sound"]
    assert replies["sound"][0].metrics["vllm:spec_decode_num_accepted_tokens"] > 0
    assert "the tensor-parallel ranks have drafted different tokens" in replies["injected"]


@pytest.mark.feature("tensor parallel", "exact", "ptp on V2")
@pytest.mark.slow
@pytest.mark.parametrize("draft_pass", ["merged", "two-pass"])
def test_tensor_parallel_ptp(tmp_path: Path, draft_pass: str) -> None:
    """Two ranks say what one says: adapters are sharded as their layers are, u is the same on every rank."""
    make_ptp_head(tmp_path / "head", make_target(tmp_path / "target", 6, seed=1, hidden_size=32), "o-ptp", window=4)
    sampled = {**GREEDY, "temperature": 0.8, "top_k": 5, "max_tokens": 16, "seed": 3}
    spec = {"method": "ptp", "model": str(tmp_path / "head"), "draft_pass": draft_pass}
    arguments = {"skip_tokenizer_init": True, "max_model_len": 64, "max_num_seqs": 4, "speculative_config": spec}
    calls = [Call([[0, 3], [1, 2, 5]], [how, how]) for how in (sampled, {**sampled, "temperature": 0.0})]
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "TORCHDYNAMO_DISABLE": "1"}
    one, two = (
        run({"one": Engine(str(tmp_path / "target"), calls, {**arguments, **ranks})}, "v2", **more)["one"]
        for ranks, more in (({}, {}), ({"tensor_parallel_size": 2}, environment))
    )
    for replies in (one, two):
        assert not isinstance(replies, str), replies
    assert [reply.tokens for reply in two] == [reply.tokens for reply in one]
    accepted = "vllm:spec_decode_num_accepted_tokens"
    assert two[-1].metrics[accepted] == one[-1].metrics[accepted]
