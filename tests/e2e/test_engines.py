"""Engines other than the usual, in tables of engine x runner: the text, and what is counted, are plain vLLM's."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from tests.support import features
from tests.support.engine import DEMO, Call, ask, build, run, run_with_plain
from tests.support.features import PTP, V1, V2
from tests.support.models import make_head, make_ptp_head, make_target, random_lora
from tests.support.quantised import quantise, quantise_weights
from tests.support.requests import ALL_DRAFTS, COLUMNS, prompt, same_logprobs
from vllm_mtpc.heads.adapters import MODULES

VOCAB, BLOCK = 48, 32
PROMPTS = [[3, 9, 4], [20, 21, 22, 23, 24], [7, 7, 1, 12]]
LORA = {"enable_lora": True, "max_lora_rank": 8}
CHUNKS = [[(7 * start + place) % VOCAB for place in range(length)] for start, length in enumerate((70, 5, 50, 61))]
# row of the feature page: columns, target, calls, arguments
CASES: dict[str, tuple[tuple[str, ...], str, list[Call], dict[str, Any]]] = {
    "8-bit target (int8, compressed-tensors)": (features.COLUMNS, "int8", [ask(PROMPTS, 24)], {"dtype": "bfloat16"}),
    "4-bit target (int4 weights, compressed-tensors)": (
        features.COLUMNS, "int4", [ask(PROMPTS, 24)], {"dtype": "bfloat16"}
    ),
    "LoRA requests on the target": ((V1, V2), "float", [ask(PROMPTS, 24), ask(PROMPTS, 24)], LORA),
    "chunked prefill": (
        (PTP,), "float", [ask(CHUNKS, 16)], {"max_num_batched_tokens": 24, "enable_prefix_caching": False}
    ),
    "torch.compile": ((V1,), "float", [ask(PROMPTS, 24)], {"enforce_eager": False}),
    # on V1 vLLM would give every request K zeros within a draft's length of the end
    "max_model_len reached": ((V1,), "demo", [ask([prompt(100)], 40)], {"max_model_len": 106}),
}  # fmt: skip
for mode in ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"):
    asked = [ask(PROMPTS, 24, logprobs=3, prompt_logprobs=2, repetition_penalty=1.2)]
    CASES[mode] = (features.COLUMNS, "float", asked, {"logprobs_mode": mode})


def table() -> list[Any]:
    rows = []
    for name, (columns, target, *_) in CASES.items():
        row = "logprobs_mode: all four" if name.endswith(("logprobs", "logits")) else name
        why = "the draft next to it is eager" if row == "torch.compile" else ""
        for column in columns:
            marks = [pytest.mark.feature(row, "exact", column, why=why), *[pytest.mark.slow] * (target != "demo")]
            rows.append(pytest.param(name, column, marks=marks, id=f"{name}, {column}"))
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engines")
    target = make_target(folder / "float" / "target", VOCAB, seed=3)
    make_head(folder / "float" / "mtpc", target, "btree", 4, 2)
    make_ptp_head(folder / "float" / "ptp", target, "o-ptp", 5, scale=0.01)
    make_lora(folder / "lora", target)
    for bits, quantised in (("int8", quantise), ("int4", quantise_weights)):
        quantised(folder / "float" / "target", folder / bits / "target")
        for head in ("mtpc", "ptp"):
            (folder / bits / head).symlink_to(folder / "float" / head)
    return folder


def make_lora(folder: Path, target: torch.nn.Module, rank: int = 8) -> None:
    """An adapter of random matrices, loud enough to change the text."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(MODULES), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(random_lora(target, rank, 0.2, 0.2), folder / "adapter_model.safetensors")


@pytest.mark.parametrize(("name", "column"), table())
def test_text_is_plain_vllms(folder: Path, name: str, column: str) -> None:
    method, runner = column.lower().split(" on ")
    _, target, calls, arguments = CASES[name]
    if "LoRA" in name:
        calls = [replace(calls[0], lora=str(folder / "lora")), calls[1]]
    place, head = (DEMO, "btree") if target == "demo" else (folder / target, method)
    spec = {"method": "ptp", "num_speculative_tokens": 3, "max_aux_rows": 24} if method == "ptp" else ALL_DRAFTS
    ours = build(place, head, calls, spec=spec, **{"max_model_len": 96, **arguments})
    drafted, plain = run_with_plain(ours, runner, VLLM_DISABLE_COMPILE_CACHE="1")
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
    layers = ["sliding_attention", "sliding_attention", "full_attention"]
    config = Gemma3TextConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, sliding_window=64, layer_types=layers, max_position_embeddings=512,
        initializer_range=0.3, query_pre_attn_scalar=32, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = Gemma3ForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    ("runner", "method", "windowed"),
    [
        *(pytest.param(*one.values, False, marks=one.marks) for one in COLUMNS),
        pytest.param("v1", "mtpc", True),
        pytest.param("v2", "mtpc", True, marks=pytest.mark.slow),
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
    spec |= {"num_speculative_tokens_per_batch_size": "off"} | ({"min_acceptance": 0.0} if runner == "v1" else {})
    calls = [ask(turn, 40, detokenize=False) for turn in turns]
    arguments = {"max_model_len": 384, "block_size": BLOCK, "enable_prefix_caching": True}
    ours, plain = run_with_plain(build(place, head, calls, spec=spec, max_num_batched_tokens=256, **arguments), runner)
    for mine, theirs in zip(ours, plain, strict=True):
        assert mine.tokens == theirs.tokens
        for counter in ("vllm:prefix_cache_queries", "vllm:prefix_cache_hits"):
            assert mine.metrics[counter] == theirs.metrics[counter]
    assert plain[-1].metrics["vllm:prefix_cache_hits"] >= 8 * BLOCK
    assert ours[-1].steps > 0 and (windowed or ours[-1].accepted > 0)


def test_jumping_clocks_and_a_full_kv_cache_change_no_greedy_token() -> None:
    """Costs are learnt from a clock; eight requests outgrow ten blocks, so some are preempted and read again."""
    calls = [ask([prompt(20, start) for start in range(8)], 100), ask([prompt(12)], 100)]
    arguments = {"max_model_len": 240, "max_num_batched_tokens": 40, "block_size": 32, "num_gpu_blocks_override": 10}
    jumping, plain = run_with_plain(build(DEMO, "btree", calls, "clock jumps", **arguments), "v1")
    assert [reply.tokens for reply in jumping] == [reply.tokens for reply in plain]
    for reply in jumping:
        passed = np.diff(reply.recorded)
        assert (passed > 3000).any() and (passed < -3000).any() and (passed == 0).any()
        assert reply.accepted > 0
    assert jumping[0].metrics["vllm:num_preemptions"] > 0


@pytest.mark.parametrize("runner", ["v1", pytest.param("v2", marks=pytest.mark.slow)])
def test_bundled_head_drafts_and_broken_head_changes_nothing(runner: str, tmp_path: Path) -> None:
    shipping, broken = (Path(shutil.copytree(DEMO / "target", tmp_path / name)) for name in ("shipping", "broken"))
    shutil.copytree(DEMO / "btree", shipping / "mtpc")
    config = Path(shutil.copytree(DEMO / "ff", broken / "mtpc" / "default"), "config.json")
    config.write_text(json.dumps({**json.loads(config.read_text()), "hidden_size": 96}))
    prompts = [list(b"def read(path):\n    "), list(b"import os\nimport ")]
    plain = build(DEMO, None, [ask(prompts, 24)], max_model_len=128)
    engines = {"plain": plain, "broken": replace(plain, model=str(broken))}
    engines["shipping"] = replace(plain, model=str(shipping))
    engines["failing"] = replace(engines["shipping"], injected="does_not_load")  # once a worker runs
    replies = {name: reply for name, (reply,) in run(engines, runner, MTPC_AUTO="1").items()}
    assert all(reply.tokens == replies["plain"].tokens for reply in replies.values())
    assert [name for name, reply in replies.items() if reply.accepted] == ["shipping"]
    assert not replies["failing"].steps or runner == "v2"  # one step, asynchronous
    assert 0 < replies["shipping"].metrics["vllm:spec_decode_steps"] <= 24 * len(prompts)
    assert "vllm:spec_decode_steps" not in replies["plain"].metrics
