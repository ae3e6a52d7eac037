"""EvaByte with the tokens of past windows freed: the text is the closed form's, memory stays bounded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.engine import Call, Engine, Reply, run
from tests.support.evabyte_reference import SIZES, Reference, make_evabyte
from tests.support.heads import check_greedy, drafts, fit_head

COUNT, LONG = 40, 130
WINDOW, BLOCK, STEP = SIZES["window_size"], 16, 24
PAGE = BLOCK // SIZES["chunk_size"]  # entries in a block of tokens, and of summaries
LENGTH = 256
ARGUMENTS = {
    "max_model_len": LENGTH,
    "block_size": BLOCK,
    "max_num_batched_tokens": STEP,
    "enable_chunked_prefill": True,
}
BYTES_OF_48_BLOCKS = 48 * 2 * PAGE * 4 * 32 * 4  # blocks x layers x entries x heads x 2D x bytes


def greedy(count: int) -> dict[str, Any]:
    return {"temperature": 0, "max_tokens": count, "ignore_eos": True}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A tiny random EvaByte, prompts, a head that knows a little, and what engines of Model Runner V1 said."""
    folder: Path = tmp_path_factory.mktemp("evabyte")
    reference = Reference(make_evabyte(folder / "target"))
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(64, 320, (length,), generator=generator).tolist() for length in (5, 31, 32, 70, 116)]
    fit_head(folder / "head", reference, SIZES, prompts, COUNT // 2)
    btree = {"speculative_config": {"method": "mtpc", "model": str(folder / "head")}}
    one_by_one = {"enable_prefix_caching": False, "max_num_seqs": 1}
    all_tokens = {"disable_hybrid_kv_cache_manager": True}
    call, again = Call(prompts, [greedy(COUNT)] * len(prompts)), Call(prompts[-1:], [greedy(COUNT)])
    long = Call(prompts[-1:], [greedy(LONG)])
    target, given = str(folder / "target"), ARGUMENTS | btree
    few_blocks = {"kv_cache_memory_bytes": BYTES_OF_48_BLOCKS}
    crowded = Engine(target, [call, again], given | few_blocks, "poisoned")
    # all drafts in every step: a plan by the clock may draft, and so preempt, nothing on a busy machine
    every = {**btree["speculative_config"], "num_speculative_tokens_per_batch_size": "off", "min_survival": 0}
    engines = {
        "crowded": replace(crowded, arguments=crowded.arguments | {"speculative_config": every}),
        "long": Engine(target, [long], given | one_by_one, "poisoned"),
        "early": Engine(target, [again], given | one_by_one, "freed_early"),
        "kept": Engine(target, [long], given | one_by_one | all_tokens, "poisoned"),
    }
    replies = run(engines, "v1")
    return SimpleNamespace(reference=reference, prompts=prompts, crowded=crowded, replies=replies)


def test_text(served: SimpleNamespace) -> None:
    """Prompts in chunks, drafts across windows, preemption and a cached prefix, in blocks that start as NaN."""
    check_crowded(served, served.replies["crowded"])


@pytest.mark.slow
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_text_on_v2(served: SimpleNamespace, async_scheduling: bool) -> None:
    replies = run({"crowded": served.crowded}, "v2", async_scheduling)["crowded"]
    assert isinstance(replies, list), replies
    check_crowded(served, replies)


def check_crowded(served: SimpleNamespace, replies: list[Reply]) -> None:
    first, second = replies
    check_greedy(served.reference, served.prompts, [first], COUNT)
    check_greedy(served.reference, served.prompts[-1:], [second], COUNT)
    assert min(drafts(first)) > 0
    assert first.metrics["vllm:num_preemptions"] > 0
    hits = second.metrics["vllm:prefix_cache_hits"] - first.metrics["vllm:prefix_cache_hits"]
    assert hits == 112  # of 116 tokens: 16 of the last window, and the summaries of three


def test_freed_windows_are_not_read(served: SimpleNamespace) -> None:
    """Without prefix caching freed blocks become NaN at once."""
    prompts = served.prompts[-1:]
    check_greedy(served.reference, prompts, served.replies["long"], LONG)
    assert min(drafts(served.replies["long"][0])) > 0
    check_greedy(served.reference, prompts, served.replies["kept"], LONG)


def test_a_window_freed_too_early_is_noticed(served: SimpleNamespace) -> None:
    assert isinstance(served.replies["early"], list), served.replies["early"]
    answer = served.replies["early"][0].tokens[0][0]
    assert not served.reference.is_greedy(served.prompts[-1], answer)


def test_memory_is_bounded(served: SimpleNamespace) -> None:
    """Entries (tokens and summaries) that one text of 246 tokens holds at most, per layer."""

    def most(reply: Reply) -> int:
        return max(reply.recorded)

    text = len(served.prompts[-1]) + LONG
    summaries = -(-text // BLOCK)  # blocks
    assert most(served.replies["long"][0]) <= summaries + (WINDOW + STEP) // PAGE
    assert most(served.replies["kept"][0]) == summaries  # a block holds its tokens next to them
    kept = most(served.replies["kept"][0]) * (BLOCK + PAGE)
    assert most(served.replies["long"][0]) * PAGE < kept / 2


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
def test_when_windows_are_freed(change: dict[str, Any], is_freed: bool) -> None:
    """Not where one KV cache group is asked for or needed, nor where blocks do not divide windows."""
    from vllm_mtpc.models.evabyte.window import frees_windows

    given = {"block_size": BLOCK, "disable_hybrid_kv_cache_manager": False}
    given |= {"kv_transfer_config": None, "speculative_config": None}
    config = SimpleNamespace(**given | change)
    config.cache_config = config.scheduler_config = config
    assert frees_windows(config, WINDOW) is is_freed
