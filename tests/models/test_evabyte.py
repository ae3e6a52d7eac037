"""EvaByte served by vLLM against the closed form: windows, chunks, prefixes, preemption, rejected drafts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support import forks
from tests.support.engine import SMALL, Call, Engine, run
from tests.support.evabyte_reference import SIZES, Reference, make_evabyte
from tests.support.heads import check_greedy, drafts, fit_head

COUNT = 40  # windows are 32 long: every answer crosses one or two
GREEDY = {"temperature": 0, "max_tokens": COUNT, "ignore_eos": True}
SMALL_BLOCKS = {"max_model_len": 256, "block_size": 16}
CHUNKS = {"max_num_batched_tokens": 24, "enable_chunked_prefill": True}
ALL_TOKENS = {"disable_hybrid_kv_cache_manager": True}  # nothing is freed; test_evabyte_bounded.py: past windows are
BYTES_OF_24_BLOCKS = 24 * 2 * (16 + 4) * 4 * 32 * 4  # blocks x layers x (tokens + summaries) x heads x 2D x bytes


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A tiny random EvaByte, prompts that end around window boundaries, and a head that knows a little."""
    folder = tmp_path_factory.mktemp("evabyte")
    reference = Reference(make_evabyte(folder / "target"))
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(64, 320, (length,), generator=generator).tolist() for length in (5, 31, 32, 70, 100)]
    fit_head(folder / "head", reference, SIZES, prompts, COUNT // 2)
    return SimpleNamespace(
        model=str(folder / "target"), head=str(folder / "head"), reference=reference, prompts=prompts
    )


def test_the_reference_notices_missing_summaries(served: SimpleNamespace) -> None:
    blind = Reference(served.reference.weights, hide_summaries=True)
    answers = [served.reference.greedy(prompt, 8) for prompt in served.prompts[-2:]]
    assert not any(blind.is_greedy(*pair) for pair in zip(served.prompts[-2:], answers, strict=True))


def test_model_runner_v1(served: SimpleNamespace) -> None:
    prompts = served.prompts
    call, again = Call(prompts, [GREEDY] * len(prompts)), Call(prompts[-1:], [GREEDY])
    btree = {"speculative_config": {"method": "mtpc", "model": served.head}}
    few_blocks = {"kv_cache_memory_bytes": BYTES_OF_24_BLOCKS}
    ngram = {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    replies = run(
        {
            "btree": Engine(served.model, [call, again], SMALL_BLOCKS | CHUNKS | ALL_TOKENS | few_blocks | btree),
            # last: vLLM starts no second engine in a process that has imported numba
            "ngram": Engine(served.model, [call], {"max_model_len": 256, "speculative_config": ngram}),
        },
        "v1",
    )
    check_greedy(served.reference, prompts, replies["ngram"], COUNT)
    check_greedy(served.reference, prompts, replies["btree"][:1], COUNT)
    check_greedy(served.reference, prompts[-1:], replies["btree"][1:], COUNT)
    first, second = replies["btree"]
    assert first.metrics["vllm:num_preemptions"] > 0
    assert second.metrics["vllm:prefix_cache_hits"] > first.metrics["vllm:prefix_cache_hits"]
    assert min(drafts(first)) > 0
    assert min(drafts(replies["ngram"][0])) > 0


def compiled(model: str, prompts: list[list[int]]) -> tuple[list[list[int]], int, int]:
    """In a fork: greedy answers, graphs that were compiled, breaks in them."""
    from torch._dynamo.utils import counters
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(model, **SMALL | SMALL_BLOCKS | CHUNKS | {"enforce_eager": False})
    asked = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    answers = llm.generate(asked, SamplingParams(**GREEDY), use_tqdm=False)
    tokens = [list(answer.outputs[0].token_ids) for answer in answers]
    return tokens, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@pytest.mark.slow
def test_compiled_by_inductor(served: SimpleNamespace) -> None:
    """All layers in one graph, which knows nothing of windows and segments; prompts are read in pieces."""
    answers, graphs, breaks = forks.call("v1", "tests.models.test_evabyte:compiled", served.model, served.prompts)
    assert (graphs, breaks) == (1, 0)
    assert all(served.reference.is_greedy(*pair) for pair in zip(served.prompts, answers, strict=True))


@pytest.mark.parametrize("kept", [{}, pytest.param(ALL_TOKENS, marks=pytest.mark.slow)], ids=["window", "all tokens"])
def test_model_runner_v2(served: SimpleNamespace, kept: dict[str, Any]) -> None:
    prompts = served.prompts[1:4]
    calls = [Call(prompts, [GREEDY] * len(prompts)), Call(prompts[-1:], [GREEDY])]
    btree = {"speculative_config": {"method": "mtpc", "model": served.head}}
    arguments = SMALL_BLOCKS | CHUNKS | kept | btree
    engines = {"btree": Engine(served.model, calls, arguments, "poisoned")}
    replies = run(engines, "v2", async_scheduling=not kept)["btree"]
    check_greedy(served.reference, prompts, replies[:1], COUNT)
    check_greedy(served.reference, prompts[-1:], replies[1:], COUNT)
    assert replies[1].metrics["vllm:prefix_cache_hits"] > 0
    assert min(drafts(replies[1])) > 0
