"""EvaByte served by vLLM against the closed form: windows, chunks, prefixes, preemption, rejected drafts.

Past windows are freed by default; with `disable_hybrid_kv_cache_manager` all tokens are kept.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support import forks
from tests.support.engine import SMALL, Call, Engine, Reply, run
from tests.support.evabyte_reference import SIZES, Reference, make_evabyte
from tests.support.heads import ask_twice, check_greedy, check_twice, fit_head

COUNT, LONG = 40, 130  # windows are 32 long: every answer crosses one or two
WINDOW, BLOCK, STEP = SIZES["window_size"], 16, 24
PAGE = BLOCK // SIZES["chunk_size"]  # entries in a block of tokens, and of summaries
ARGUMENTS = {"max_model_len": 256, "block_size": BLOCK, "max_num_batched_tokens": STEP, "enable_chunked_prefill": True}
ALL_TOKENS = {"disable_hybrid_kv_cache_manager": True}
LAYER_BYTES = 2 * 4 * 32 * 4  # of an entry: layers x heads x 2D x bytes
BYTES_OF_48_BLOCKS = 48 * PAGE * LAYER_BYTES
BYTES_OF_24_BLOCKS = 24 * (BLOCK + PAGE) * LAYER_BYTES  # with their tokens


def greedy(count: int) -> dict[str, Any]:
    return {"temperature": 0, "max_tokens": count, "ignore_eos": True}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A tiny random EvaByte, prompts that end around window boundaries, a head, and answers of Model Runner V1."""
    folder = tmp_path_factory.mktemp("evabyte")
    reference = Reference(make_evabyte(folder / "target"))
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(64, 320, (length,), generator=generator).tolist() for length in (5, 31, 32, 70, 116)]
    fit_head(folder / "head", reference, SIZES, prompts, COUNT // 2)
    head = {"method": "mtpc", "model": str(folder / "head")}
    # all drafts in every step: a plan by the clock may draft, and so preempt, nothing on a busy machine
    every = head | {"num_speculative_tokens_per_batch_size": "off"}
    every_v1 = {"speculative_config": every}
    target, btree = str(folder / "target"), ARGUMENTS | {"speculative_config": head}
    one_by_one = btree | {"enable_prefix_caching": False, "max_num_seqs": 1}
    twice, long = ask_twice(prompts, greedy(COUNT)), Call(prompts[-1:], [greedy(LONG)])
    few, few_with_tokens = ({"kv_cache_memory_bytes": size} for size in (BYTES_OF_48_BLOCKS, BYTES_OF_24_BLOCKS))
    engines = {
        "crowded": Engine(target, twice, ARGUMENTS | few | every_v1, "poisoned"),
        "crowded, all tokens": Engine(target, twice, ARGUMENTS | ALL_TOKENS | few_with_tokens | every_v1),
        "long": Engine(target, [long], one_by_one, "poisoned"),
        "long, all tokens": Engine(target, [long], one_by_one | ALL_TOKENS, "poisoned"),
        "freed early": Engine(target, twice[1:], one_by_one, "freed_early"),
    }
    replies = run(engines, "v1")
    return SimpleNamespace(
        target=target, btree=btree, every=every, few=few, reference=reference, prompts=prompts, replies=replies
    )


def check_crowded(served: SimpleNamespace, replies: list[Reply], hits: int | None) -> None:
    """All answers in few blocks, then the last prompt again; `hits`: tokens of it in the prefix cache."""
    first, second = replies
    check_twice(served.reference, served.prompts, replies, COUNT)
    assert first.metrics["vllm:num_preemptions"] > 0
    found = second.metrics["vllm:prefix_cache_hits"] - first.metrics["vllm:prefix_cache_hits"]
    assert hits in (None, found)


@pytest.mark.slow
def test_reference_without_summaries_is_noticed(served: SimpleNamespace) -> None:
    blind = Reference(served.reference.weights, hide_summaries=True)
    answers = [served.reference.greedy(prompt, 8) for prompt in served.prompts[-2:]]
    assert not any(blind.is_greedy(*pair) for pair in zip(served.prompts[-2:], answers, strict=True))


@pytest.mark.parametrize(("name", "hits"), [("crowded", 112), ("crowded, all tokens", None)])
def test_text_with_chunks_preemption_and_prefix_on_v1(served: SimpleNamespace, name: str, hits: int | None) -> None:
    """Of 116 tokens 112 are found: 16 of the last window, and the summaries of three. Blocks start as NaN."""
    check_crowded(served, served.replies[name], hits)


@pytest.mark.parametrize("name", ["long", "long, all tokens"])
def test_long_text_on_v1(served: SimpleNamespace, name: str) -> None:
    """Freed blocks become NaN without prefix caching."""
    check_greedy(served.reference, served.prompts[-1:], served.replies[name], LONG)
    assert 0 < served.replies[name][0].accepted < served.replies[name][0].drafted


@pytest.mark.slow  # numba compiles ngram; the target's part is that of the other texts
def test_text_with_ngram_on_v1(served: SimpleNamespace) -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    call = Call(served.prompts, [greedy(COUNT)] * len(served.prompts))
    engine = Engine(served.target, [call], {"max_model_len": 256, "speculative_config": ngram})
    replies = run({"ngram": engine}, "v1")["ngram"]
    check_greedy(served.reference, served.prompts, replies, COUNT)
    assert 0 < replies[0].accepted < replies[0].drafted


def test_window_freed_too_early_is_noticed(served: SimpleNamespace) -> None:
    replies = served.replies["freed early"]
    assert isinstance(replies, list), replies
    assert not served.reference.is_greedy(served.prompts[-1], replies[0].tokens[0][0])


def test_memory_of_a_long_text_is_bounded(served: SimpleNamespace) -> None:
    """Entries (tokens and summaries) that a text of 246 tokens holds at most, per layer."""
    freed, kept = (max(served.replies[name][0].recorded) for name in ("long", "long, all tokens"))
    summaries = -(-(len(served.prompts[-1]) + LONG) // BLOCK)  # blocks
    assert freed <= summaries + (WINDOW + STEP) // PAGE
    assert kept == summaries  # a block holds its tokens next to them
    assert freed * PAGE < kept * (BLOCK + PAGE) / 2


@pytest.mark.slow
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_text_with_preemption_on_v2(served: SimpleNamespace, async_scheduling: bool) -> None:
    arguments = ARGUMENTS | served.few | {"speculative_config": served.every}
    engine = Engine(served.target, ask_twice(served.prompts, greedy(COUNT)), arguments, "poisoned")
    check_crowded(served, run({"crowded": engine}, "v2", async_scheduling)["crowded"], 112)


@pytest.mark.parametrize("kept", [{}, pytest.param(ALL_TOKENS, marks=pytest.mark.slow)], ids=["window", "all tokens"])
def test_text_on_v2(served: SimpleNamespace, kept: dict[str, Any]) -> None:
    prompts = served.prompts[1:4]
    engine = Engine(served.target, ask_twice(prompts, greedy(COUNT)), served.btree | kept, "poisoned")
    check_twice(served.reference, prompts, run({"btree": engine}, "v2", async_scheduling=not kept)["btree"], COUNT)


def compiled(model: str, prompts: list[list[int]]) -> tuple[list[list[int]], int, int]:
    """In a fork: greedy answers, number of compiled graphs, breaks in them."""
    from torch._dynamo.utils import counters
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(model, **SMALL | ARGUMENTS | {"enforce_eager": False})
    asked = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    answers = llm.generate(asked, SamplingParams(**greedy(COUNT)), use_tqdm=False)
    tokens = [list(answer.outputs[0].token_ids) for answer in answers]
    return tokens, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@pytest.mark.slow
def test_model_is_compiled_in_one_graph(served: SimpleNamespace) -> None:
    answers, graphs, breaks = forks.call("v1", "tests.models.test_evabyte:compiled", served.target, served.prompts)
    assert (graphs, breaks) == (1, 0)
    assert all(served.reference.is_greedy(*pair) for pair in zip(served.prompts, answers, strict=True))


@pytest.mark.parametrize(
    ("change", "is_freed"),
    [
        ({}, True),
        ({"block_size": 48}, False),
        ({"disable_hybrid_kv_cache_manager": True}, False),
        ({"kv_transfer_config": SimpleNamespace()}, False),
        ({"speculative_config": SimpleNamespace(use_eagle=lambda: True)}, False),
        ({"speculative_config": SimpleNamespace(use_eagle=lambda: False)}, True),
    ],
)
def test_windows_are_freed_unless_one_cache_group_is_needed(change: dict[str, Any], is_freed: bool) -> None:
    from vllm_mtpc.models.evabyte.vllm_model import frees_windows

    given = {"block_size": BLOCK, "disable_hybrid_kv_cache_manager": False}
    given |= {"kv_transfer_config": None, "speculative_config": None}
    config = SimpleNamespace(**given | change)
    config.cache_config = config.scheduler_config = config
    assert frees_windows(config, WINDOW) is is_freed
