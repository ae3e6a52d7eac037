"""Targets and engines other than the usual: quantised weights, LoRA requests, every mode of logprobs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.engine import Call, Engine, Reply, run
from tests.support.models import make_head, make_ptp_head, make_target
from tests.support.quantised import quantise, quantise_weights
from tests.support.requests import ACCEPTED, ON, same_logprobs
from vllm_mtpc.heads.adapters import MODULES

PROMPTS = [[3, 9, 4], [20, 21, 22, 23, 24], [7, 7, 1, 12]]
GREEDY = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, "detokenize": False}
MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
COLUMNS = [
    pytest.param("v1", "btree", marks=ON["mtpc on V1"]),
    pytest.param("v2", "btree", marks=ON["mtpc on V2"]),
    pytest.param("v2", "o-ptp", marks=ON["ptp on V2"]),
]
BITS = {
    bits: pytest.mark.feature(name, "exact")
    for bits, name in {
        "int8": "8-bit target (int8, compressed-tensors)",
        "int4": "4-bit target (int4 weights, compressed-tensors)",
    }.items()
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("variants")
    target = make_target(folder / "float", 48, seed=3)
    quantise(folder / "float", folder / "int8")
    quantise_weights(folder / "float", folder / "int4")
    make_head(folder / "btree", target, "btree", 4, 2)
    make_ptp_head(folder / "o-ptp", target, "o-ptp", 5, scale=0.01)
    make_lora(folder / "lora", target)
    return folder


def make_lora(folder: Path, target: torch.nn.Module, rank: int = 8) -> None:
    """An adapter of random matrices, loud enough to change the text."""
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for name, module in target.named_modules():
        if name.rpartition(".")[2] in MODULES:
            for part, shape in (("A", (rank, module.in_features)), ("B", (module.out_features, rank))):
                tensors[f"base_model.model.{name}.lora_{part}.weight"] = torch.randn(shape, generator=generator) * 0.2
    folder.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(MODULES), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")


def engine(folder: Path, target: str, head: str | None, calls: list[Call], **arguments: Any) -> Engine:
    if head:
        method = (
            {"method": "ptp", "num_speculative_tokens": 3, "max_aux_rows": 24} if "ptp" in head else {"method": "mtpc"}
        )
        arguments["speculative_config"] = {**method, "model": str(folder / head)}
    arguments = {"skip_tokenizer_init": True, "max_model_len": 96, **arguments}
    return Engine(str(folder / target), calls, arguments)


def plain_call(**more: Any) -> Call:
    return Call(PROMPTS, [{**GREEDY, **more}] * len(PROMPTS))


@pytest.fixture(scope="module")
def outputs(folder: Path) -> Any:
    """Replies by runner, kind of target and head ("plain": none), made when a runner is first asked for."""
    made: dict[str, dict[str, list[Reply]]] = {}

    def engines_of(runner: str) -> dict[str, Engine]:
        heads = [None, *(head for (where, head), _, _ in COLUMNS if where == runner)]
        engines = {}
        for head in heads:
            for bits in ("int8", "int4"):
                engines[f"{bits} {head}"] = engine(folder, bits, head, [plain_call()], dtype="bfloat16")
            if head != "o-ptp":
                adapted = Call(PROMPTS, [GREEDY] * len(PROMPTS), lora=str(folder / "lora"))
                arguments = {"enable_lora": True, "max_lora_rank": 8}
                engines[f"lora {head}"] = engine(folder, "float", head, [adapted, plain_call()], **arguments)
        return engines

    def of(runner: str) -> dict[str, list[Reply]]:
        if runner not in made:
            made[runner] = run(engines_of(runner), runner, async_scheduling=runner == "v2")
        return made[runner]

    return of


@pytest.mark.slow
@pytest.mark.parametrize(
    ("runner", "bits", "head"),
    [
        pytest.param("v1", "int8", "btree", marks=[ON["mtpc on V1"], BITS["int8"]]),
        pytest.param("v1", "int4", "btree", marks=[ON["mtpc on V1"], BITS["int4"]]),
        pytest.param("v2", "int8", "btree", marks=[ON["mtpc on V2"], BITS["int8"]]),
        pytest.param("v2", "int8", "o-ptp", marks=[ON["ptp on V2"], BITS["int8"]]),
        pytest.param("v2", "int4", "btree", marks=[ON["mtpc on V2"], BITS["int4"]]),
        pytest.param("v2", "int4", "o-ptp", marks=[ON["ptp on V2"], BITS["int4"]]),
    ],
)
def test_quantised_target_keeps_its_text(outputs: Any, runner: str, bits: str, head: str) -> None:
    plain, ours = outputs(runner)[f"{bits} None"][0], outputs(runner)[f"{bits} {head}"][0]
    assert ours.tokens == plain.tokens
    assert ours.metrics[ACCEPTED] > 0


@pytest.mark.feature("LoRA requests on the target", "exact")
@pytest.mark.slow
@pytest.mark.parametrize(
    "runner", [pytest.param("v1", marks=ON["mtpc on V1"]), pytest.param("v2", marks=ON["mtpc on V2"])]
)
def test_lora_request_keeps_its_text(outputs: Any, runner: str) -> None:
    plain, ours = outputs(runner)["lora None"], outputs(runner)["lora btree"]
    assert ours[0].tokens == plain[0].tokens != plain[1].tokens == ours[1].tokens
    assert ours[1].metrics[ACCEPTED] > 0


@pytest.mark.feature("logprobs_mode: all four", "exact")
@pytest.mark.slow
@pytest.mark.parametrize(("runner", "head"), COLUMNS)
def test_logprobs_of_every_mode_equal_plain(folder: Path, runner: str, head: str) -> None:
    asked = [plain_call(logprobs=3, prompt_logprobs=2, repetition_penalty=1.2)]
    engines = {
        f"{mode} {name}": engine(folder, "float", name, asked, logprobs_mode=mode)
        for mode in MODES
        for name in (None, head)
    }
    replies = run(engines, runner, async_scheduling=runner == "v2")
    for mode in MODES:
        plain, ours = replies[f"{mode} None"][0], replies[f"{mode} {head}"][0]
        assert ours.tokens == plain.tokens
        for index in range(len(PROMPTS)):
            same_logprobs(plain.logprobs[index][0], ours.logprobs[index][0])
            same_logprobs(plain.prompt_logprobs[index], ours.prompt_logprobs[index])


@pytest.mark.feature("chunked prefill", "exact", "ptp on V2")
@pytest.mark.slow
def test_prompt_in_chunks_keeps_its_text_with_ptp(folder: Path) -> None:
    """Prompts longer than a step: their pieces are read next to other requests' drafts."""
    prompts = [[(7 * start + place) % 48 for place in range(length)] for start, length in enumerate((70, 5, 50, 61))]
    calls = [Call(prompts, [{**GREEDY, "max_tokens": 16}] * len(prompts))]
    engines = {
        name: engine(folder, "float", head, calls, max_num_batched_tokens=24, enable_prefix_caching=False)
        for name, head in (("plain", None), ("ours", "o-ptp"))
    }
    replies = run(engines, "v2", async_scheduling=True)
    assert replies["ours"][0].tokens == replies["plain"][0].tokens
    assert replies["ours"][0].metrics[ACCEPTED] > 0


@pytest.mark.feature("torch.compile", "exact", "mtpc on V1", why="the draft next to it is eager")
@pytest.mark.slow
def test_compiled_target_keeps_its_text(folder: Path) -> None:
    """torch.compile of the target, the draft next to it eager; V1, because inductor does not run in the interpreter."""
    compiled = {"enforce_eager": False}
    engines = {str(head): engine(folder, "float", head, [plain_call()], **compiled) for head in (None, "btree")}
    engines["eager"] = engine(folder, "float", "btree", [plain_call()])
    replies = run(engines, "v1", VLLM_DISABLE_COMPILE_CACHE="1")
    assert replies["btree"][0].tokens == replies["None"][0].tokens == replies["eager"][0].tokens
    assert replies["btree"][0].metrics[ACCEPTED] > 0
