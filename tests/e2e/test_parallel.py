"""Drafts with the model split over two processes."""

from __future__ import annotations

import pytest

from tests.e2e.engine import Call, Engine, run
from tests.e2e.models import make_head, make_target

PROMPTS = [[3, 9, 4], [7, 7, 1, 12, 5, 2], [8]]
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


def test_tensor_parallel_v1(tiny) -> None:
    compare(tiny, "v1", tensor_parallel_size=2)


@pytest.mark.slow
def test_tensor_parallel_v2(tiny) -> None:
    compare(tiny, "v2", tensor_parallel_size=2)


@pytest.mark.slow
def test_pipeline_parallel_v2(tiny) -> None:
    compare(tiny, "v2", pipeline_parallel_size=2)
