"""The prefix cache finds as much with a head as without one: vLLM's counters of asked and found tokens are equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from tests.support.engine import Call, Engine, Reply, run_with_plain
from tests.support.models import make_head
from tests.support.requests import ACCEPTED, COLUMNS
from vllm_mtpc import demo

OPTIONS = {"mtpc": {"method": "mtpc"}, "ptp": {"method": "ptp", "max_aux_rows": 32}}
HEADS = {"mtpc": "btree", "ptp": "late"}
VOCAB, BLOCK, ANSWER = 48, 32, 40
COUNTED = ("vllm:prefix_cache_queries", "vllm:prefix_cache_hits")


def make_windowed(folder: Path) -> Any:
    """A target whose layers see windows of 64 tokens, but for every third, which sees all: two groups of KV blocks."""
    torch.manual_seed(3)
    config = Gemma3TextConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        sliding_window=64,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        max_position_embeddings=512,
        initializer_range=0.3,
        query_pre_attn_scalar=32,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = Gemma3ForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prefixes")
    make_head(folder / "head", make_windowed(folder / "target"), "btree", 4, 2)
    return folder


def conversations() -> list[Call]:
    """Three texts that begin alike, asked again and then after the answers to others: hits of all lengths."""
    begin = [byte % VOCAB for byte in (Path(__file__).read_bytes())[: 5 * BLOCK + 3]]
    greedy = {"temperature": 0.0, "max_tokens": ANSWER, "ignore_eos": True, "detokenize": False}
    turns = [[begin], [begin, begin[: 3 * BLOCK], [*begin, 5, 6]], [[*begin, *range(40)], begin[: 2 * BLOCK + 1]]]
    return [Call(turn, [greedy] * len(turn)) for turn in turns]


def asked_and_found(runner: str, target: Path, head: Path | None, method: str) -> Engine:
    arguments: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 384, "block_size": BLOCK}
    arguments |= {"enable_prefix_caching": True, "max_num_batched_tokens": 256}
    if head is not None:
        spec = {**OPTIONS[method], "model": str(head), "num_speculative_tokens_per_batch_size": "off"}
        arguments["speculative_config"] = spec | ({"min_acceptance": 0.0} if runner == "v1" else {})
    return Engine(str(target), conversations(), arguments)


def check(runner: str, target: Path, head: Path, method: str = "mtpc") -> list[Reply]:
    """Equal text and counters; returns the head's replies."""
    engines = (asked_and_found(runner, target, one, method) for one in (head, None))
    with_head, without = run_with_plain(*engines, runner)
    for plain, ours in zip(without, with_head, strict=True):
        assert ours.tokens == plain.tokens
        assert {name: ours.metrics[name] for name in COUNTED} == {name: plain.metrics[name] for name in COUNTED}
    assert without[-1].metrics["vllm:prefix_cache_hits"] >= 8 * BLOCK
    return with_head


@pytest.mark.parametrize(
    ("runner", "method"),
    [COLUMNS[0], *(pytest.param(*column.values, marks=[*column.marks, pytest.mark.slow]) for column in COLUMNS[1:])],
)
def test_prefix_cache_hits_equal_plain_vllm(runner: str, method: str) -> None:
    ours = check(runner, demo.path("target"), demo.path(HEADS[method]), method)
    assert ours[-1].metrics[ACCEPTED] > 0


@pytest.mark.parametrize("runner", ["v1", pytest.param("v2", marks=pytest.mark.slow)])
def test_prefix_cache_hits_with_sliding_windows_equal_plain_vllm(folder: Path, runner: str) -> None:
    ours = check(runner, folder / "target", folder / "head")
    assert ours[-1].metrics["vllm:spec_decode_num_drafts"] > 0
