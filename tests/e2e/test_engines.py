"""Engines other than the usual, in tables of engine x runner: the text, and what is counted, are plain vLLM's.

Of several ranks `tests/proposers/test_ranks.py` compares the drafts.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from benchmarks.tiny_targets import INT4, INT8, quantise
from tests.support.engine import DEMO, TWO_RANKS, Call, ask, build, run_with_plain
from tests.support.models import make_head, make_ptp_head, make_target, random_lora
from tests.support.requests import ALL_DRAFTS, same_logprobs
from vllm_mtpc.heads.adapters import MODULES
from vllm_mtpc.heads.leaves.own import SHARD_BYTES

VOCAB, BLOCK = 48, 32
PROMPTS = [[3, 9, 4], [20, 21, 22, 23, 24], [7, 7, 1, 12]]
LORA = {"enable_lora": True, "max_lora_rank": 8}
CHUNKS = [[(7 * start + place) % VOCAB for place in range(length)] for start, length in enumerate((70, 5, 50, 61))]
TENSOR, TWICE = {"tensor_parallel_size": 2}, [ask(PROMPTS, 24), ask(PROMPTS, 24, temperature=1.0, seed=11)]
# each rank has the logits of its part of the lm_head, the second one of none
DIVIDED = TENSOR | {"worker_extension_cls": "tests.support.workers.Divides"}
# engine: (runner, method)s, target, calls, arguments
EVERY = (("v1", "mtpc"), ("v2", "mtpc"), ("v2", "ptp"))
CASES: dict[str, tuple[tuple[tuple[str, str], ...], str, list[Call], dict[str, Any]]] = {
    "8 bit": (EVERY, "int8", [ask(PROMPTS, 24)], {"dtype": "bfloat16"}),
    "8 bit, lm_head too": (EVERY[:1], "int8 lm_head", [ask(PROMPTS, 24)], {}),
    "4 bit": (EVERY, "int4", [ask(PROMPTS, 24)], {"dtype": "bfloat16"}),
    "LoRA requests": (EVERY[:2], "float", [ask(PROMPTS, 24), ask(PROMPTS, 24)], LORA),
    "chunked prefill": (
        EVERY[2:], "float", [ask(CHUNKS, 16)], {"max_num_batched_tokens": 24, "enable_prefix_caching": False}
    ),
    "torch.compile": (EVERY[:1], "float", [ask(PROMPTS, 24)], {"enforce_eager": False}),  # the draft is eager
    "tensor parallel": (EVERY[:2], "float", TWICE, TENSOR),
    "tensor parallel, merged": (EVERY[2:], "float", TWICE[:1], TENSOR),
    "tensor parallel, two passes": (EVERY[2:], "float", TWICE[:1], TENSOR),
    "tensor parallel, divided unembeddings": (EVERY[:2], "large", TWICE, TENSOR),
    "tensor parallel, divided lm_head": (EVERY[:1], "shared", TWICE, DIVIDED),
    "tensor parallel, divided lm_head, low rank": (EVERY[:1], "low rank", TWICE, DIVIDED),
    "pipeline parallel": (EVERY[1:2], "float", TWICE, {"pipeline_parallel_size": 2}),
}  # fmt: skip
for mode in ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"):
    asked = [ask(PROMPTS, 24, logprobs=3, prompt_logprobs=2, repetition_penalty=1.2)]
    CASES[mode] = (EVERY, "float", asked, {"logprobs_mode": mode})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engines")
    target = make_target(folder / "float" / "target", VOCAB, seed=3)
    make_head(folder / "float" / "mtpc", target, "btree", 4, 2)
    make_ptp_head(folder / "float" / "ptp", target, "o-ptp", 5, scale=0.01)
    for bits, scheme in (("int8", INT8), ("int4", INT4)):
        quantise(folder / "float" / "target", folder / bits / "target", scheme)
        for head in ("mtpc", "ptp"):
            (folder / bits / head).symlink_to(folder / "float" / head)
    quantise(folder / "float" / "target", folder / "int8 lm_head" / "target", INT8, ignore=())
    make_head(folder / "int8 lm_head" / "mtpc", target, "btree", 4, 2, leaves={"kind": "lm_head", "expander_rank": 16})
    for name, ranks in (("shared", {}), ("low rank", {"component_rank": 8, "token_rank": 4})):
        few = make_target(folder / name / "target", 30, seed=3)
        leaves = {"kind": "lm_head", "expander_rank": 8, **ranks}
        make_head(folder / name / "mtpc", few, "btree", 4, 3, steps=70, leaves=leaves)
    # unembeddings of a size that is divided over ranks, unevenly
    assert 8 * 32 * 517 * 64 * torch.bfloat16.itemsize >= SHARD_BYTES["cpu"]
    large = make_target(folder / "large" / "target", 517, seed=3)
    make_head(folder / "large" / "mtpc", large, "cp", 8, 32, steps=8)
    # an adapter of random matrices, loud enough to change the text
    (folder / "lora").mkdir()
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": list(MODULES), "bias": "none"}
    (folder / "lora" / "adapter_config.json").write_text(json.dumps(config))
    save_file(random_lora(target, 8, 0.2, 0.2), folder / "lora" / "adapter_model.safetensors")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "runner", "method"), [(name, *engine) for name, (engines, *_) in CASES.items() for engine in engines]
)
def test_text_is_plain_vllms(folder: Path, name: str, runner: str, method: str) -> None:
    _, target, calls, arguments = CASES[name]
    if "LoRA" in name:
        calls = [replace(calls[0], lora=str(folder / "lora")), calls[1]]
    spec = {"method": "ptp", "num_speculative_tokens": 3, "max_aux_rows": 24} if method == "ptp" else ALL_DRAFTS
    spec = spec | ({"draft_pass": "merged"} if "merged" in name else {})
    ours = build(folder / target, method, calls, spec=spec, **{"max_model_len": 96, **arguments})
    environment = TWO_RANKS if "parallel" in name else {"VLLM_DISABLE_COMPILE_CACHE": "1"}
    drafted, plain = run_with_plain(ours, runner, **environment)
    for mine, theirs in zip(drafted, plain, strict=True):
        assert mine.tokens == theirs.tokens
        if "logprobs_mode" in arguments:
            for index in range(len(PROMPTS)):
                same_logprobs(theirs.logprobs[index][0], mine.logprobs[index][0])
                same_logprobs(theirs.prompt_logprobs[index], mine.prompt_logprobs[index])
    assert len({str(reply.tokens) for reply in plain}) == len(plain), "the adapter changes the text"
    # with a penalty hardly any draft is right
    assert (drafted[-1].steps if "logprobs_mode" in arguments else drafted[-1].accepted) > 0


def make_windowed(folder: Path) -> Any:
    """A target whose layers see windows of 64 tokens, but for every third, which sees all: two groups of KV blocks."""
    torch.manual_seed(3)
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "head_dim": 32}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.3, "query_pre_attn_scalar": 32}
    sizes |= {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": 64}
    config = Gemma3TextConfig(**sizes, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    model = Gemma3ForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    ("runner", "method", "windowed"),
    [
        ("v1", "mtpc", False),
        ("v1", "mtpc", True),
        *(
            pytest.param("v2", *case, marks=pytest.mark.slow)
            for case in (("mtpc", False), ("mtpc", True), ("ptp", False))
        ),
    ],
)
def test_prefix_cache_hits_equal_plain_vllm(runner: str, method: str, windowed: bool, tmp_path: Path) -> None:
    """Three texts that begin alike, asked again and then after the answers to others: hits of all lengths."""
    begin = [byte % VOCAB for byte in Path(__file__).read_bytes()[: 5 * BLOCK + 3]]
    turns = [[begin], [begin, begin[: 3 * BLOCK], [*begin, 5, 6]], [[*begin, *range(40)], begin[: 2 * BLOCK + 1]]]
    place, head = DEMO, {"mtpc": "btree", "ptp": "late"}[method]
    if windowed:
        place, head = tmp_path, "head"
        make_head(tmp_path / "head", make_windowed(tmp_path / "target"), "btree", 4, 2)
    spec = {"method": "ptp", "max_aux_rows": 32} if method == "ptp" else {}
    spec |= {"num_speculative_tokens_per_batch_size": "off"}
    calls = [ask(turn, 40, detokenize=False) for turn in turns]
    arguments = {"max_model_len": 384, "block_size": BLOCK, "enable_prefix_caching": True}
    ours, plain = run_with_plain(build(place, head, calls, spec=spec, max_num_batched_tokens=256, **arguments), runner)
    for mine, theirs in zip(ours, plain, strict=True):
        assert mine.tokens == theirs.tokens
        for counter in ("vllm:prefix_cache_queries", "vllm:prefix_cache_hits"):
            assert mine.metrics[counter] == theirs.metrics[counter]
    assert plain[-1].metrics["vllm:prefix_cache_hits"] >= 8 * BLOCK
    assert ours[-1].steps > 0 and (windowed or ours[-1].accepted > 0)
