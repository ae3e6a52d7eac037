"""Both byte-level models: configuration, tensor parallelism, LoRA draft layers, chat over HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import byte_llama_reference, evabyte_reference
from tests.support.engine import Call, Engine, run
from tests.support.heads import ask_twice, check_greedy, check_twice, fit_head
from vllm_mtpc.checkpoint.load import module_names
from vllm_mtpc.engine.server import run_server
from vllm_mtpc.errors import ServeConfigError
from vllm_mtpc.heads.adapters import MODULES, Adapters
from vllm_mtpc.models.hooks import check_limits

MODELS = ("evabyte", "byte_llama")
COUNT = 24
GREEDY = {"temperature": 0, "max_tokens": COUNT, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "Which user, and why? \n\n"}]


def make_model(name: str, target: Path) -> SimpleNamespace:
    """A tiny random target with its `reference`, its `sizes` and two `prompts`; EvaByte's cross windows of 32."""
    if name == "evabyte":
        reference: Any = evabyte_reference.Reference(evabyte_reference.make_evabyte(target))
        generator = torch.Generator().manual_seed(1)
        prompts = [torch.randint(64, 320, (length,), generator=generator).tolist() for length in (31, 70)]
        return SimpleNamespace(reference=reference, sizes=evabyte_reference.SIZES, prompts=prompts)
    texts = byte_llama_reference.make_texts()
    byte_llama_reference.make_byte_llama(target, texts)
    reference = byte_llama_reference.Reference(target)
    prompts = [texts[0][:20], texts[1][:60]]
    return SimpleNamespace(reference=reference, sizes=reference.llama.config.to_dict(), prompts=prompts)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders evabyte/target and byte_llama/target."""
    folder = tmp_path_factory.mktemp("served")
    for name in MODELS:
        make_model(name, folder / name / "target")
    return folder


def engine_config(model: Path, **arguments: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    import vllm_mtpc.plugin

    vllm_mtpc.plugin.register()
    return EngineArgs(model=str(model), dtype="float32", **arguments).create_engine_config()


def test_configuration_needs_no_remote_code(models: Path) -> None:
    from vllm.tokenizers.registry import cached_tokenizer_from_config

    evabyte = engine_config(models / "evabyte" / "target").model_config
    assert (evabyte.architecture, evabyte.tokenizer_mode) == ("EvaByteForCausalLM", "evabyte")
    assert not evabyte.trust_remote_code
    tokenizer = cached_tokenizer_from_config(evabyte)
    assert (tokenizer.eos_token_id, tokenizer.encode("a")) == (11, [1, 161])
    byte_llama = engine_config(models / "byte_llama" / "target").model_config
    assert byte_llama.architecture == "TPULlamaForCausalLM"
    assert not hasattr(byte_llama.hf_config, "expand_input_ids_dict")
    stops = byte_llama.try_get_generation_config()
    assert (stops["eos_token_id"], stops["bos_token_id"]) == ([259], None)


@pytest.mark.parametrize(
    ("model", "arguments", "named"),
    [
        ("evabyte", {"block_size": 6}, "--block-size 6 .* multiples of 4"),
        ("evabyte", {"block_size": 12, "disable_hybrid_kv_cache_manager": False}, "--block-size 12: .* divisors of 32"),
        ("evabyte", {"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8.*allowed: auto"),
        ("evabyte", {"tensor_parallel_size": 3}, "divisible by tensor parallel size"),
        ("evabyte", {"pipeline_parallel_size": 2}, "--pipeline-parallel-size 2"),
        ("evabyte", {"hf_overrides": {"attention_class": "softmax"}}, "attention_class='softmax'.*allowed: 'eva'"),
        ("byte_llama", {"pipeline_parallel_size": 2}, "--pipeline-parallel-size 2"),
        ("byte_llama", {"enable_prompt_embeds": True}, "--enable-prompt-embeds"),
        ("byte_llama", {"hf_overrides": {"add_qk_norm": True}}, "add_qk_norm=true.*allowed: false"),
    ],
)
def test_option_that_the_model_lacks_is_refused(models: Path, model: str, arguments: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        engine_config(models / model / "target", **arguments)


@pytest.mark.parametrize("name", ["EvaByte", "a byte-level Llama"])
def test_ptp_head_is_refused(name: str) -> None:
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=1), speculative_config=SimpleNamespace(method="ptp")
    )
    with pytest.raises(ServeConfigError, match=f"'ptp' with {name} .*use an MtPC head"):
        check_limits(config, name)


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("name", MODELS)
def test_text_with_two_tensor_parallel_ranks(tmp_path: Path, name: str, runner: str) -> None:
    model = make_model(name, tmp_path / "target")
    fit_head(tmp_path / "head", model.reference, model.sizes, model.prompts, COUNT // 2)
    arguments = {"tensor_parallel_size": 2, "max_model_len": 128}
    arguments |= {"speculative_config": {"method": "mtpc", "model": str(tmp_path / "head")}}
    arguments |= {"block_size": 32} if name == "evabyte" else {}  # divides the window: past ones are freed
    engine = Engine(str(tmp_path / "target"), [Call(model.prompts, [GREEDY] * 2)], arguments)
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "TORCHDYNAMO_DISABLE": "1"}
    replies = run({"btree": engine}, runner, async_scheduling=runner == "v2", **environment)["btree"]
    check_greedy(model.reference, model.prompts, replies, COUNT)
    assert 0 < replies[0].accepted < replies[0].drafted


def random_adapters(weights: dict[str, Tensor], layer: int) -> tuple[Adapters, dict[str, Tensor]]:
    """Loud adapters of every projection of a layer, and the weights with these merged into them."""
    generator, rank, alpha = torch.Generator().manual_seed(0), 4, 8
    lora, merged = {}, dict(weights)
    for name, weight in weights.items():
        parts = name.removesuffix(".weight").split(".")
        if parts[-1] in MODULES and int(parts[2]) == layer:
            a = torch.randn(rank, weight.shape[1], generator=generator)
            b = torch.randn(len(weight), rank, generator=generator)
            b *= 0.3 * weight.std() / (alpha / rank * rank**0.5)
            for part, value in (("A", a), ("B", b)):
                lora[f"base_model.model.{'.'.join(parts)}.lora_{part}.weight"] = value
            merged[name] = weight + alpha / rank * b @ a
    return Adapters([layer], rank, alpha, module_names(lora), lora), merged


@pytest.mark.slow
@pytest.mark.parametrize(("name", "block"), [("evabyte", 16), ("byte_llama", 32)])
def test_head_reads_states_of_draft_layers_on_v2(tmp_path: Path, name: str, block: int) -> None:
    """They are those of a target with the adapters merged: in chunks, after rejected drafts and cached prefixes."""
    model = make_model(name, tmp_path / "target")
    reference, prompts = model.reference, model.prompts
    if name == "evabyte":
        layers, merged = random_adapters(reference.weights, 1)
        adapted: Any = evabyte_reference.Reference(merged)
    else:
        layers, merged = random_adapters(reference.llama.state_dict(), 1)
        adapted = byte_llama_reference.Reference(tmp_path / "target")
        adapted.llama.load_state_dict(merged)
    fit_head(tmp_path / "head", reference, model.sizes, prompts, COUNT // 2, adapted, layers)
    arguments = {"max_model_len": 128, "max_num_batched_tokens": 24, "enable_chunked_prefill": True}
    # a draft in every step: a plan by the clock may choose none
    head = {"method": "mtpc", "model": str(tmp_path / "head"), "num_speculative_tokens_per_batch_size": "off"}
    arguments |= {"speculative_config": head, "block_size": block}
    replies = run({"layers": Engine(str(tmp_path / "target"), ask_twice(prompts, GREEDY), arguments, "layers")}, "v2")[
        "layers"
    ]
    check_twice(reference, prompts, replies, COUNT)
    answers = replies[0].tokens + replies[1].tokens
    texts = [prompt + answer[0] for prompt, answer in zip([*prompts, prompts[-1]], answers, strict=True)]
    states, own = ([one.hidden(text) for text in texts] for one in (adapted, reference))
    noted = [note for reply in replies for note in reply.recorded if note["prefix"] <= len(texts[note["request"]])]
    assert len(noted) > 20
    for index, note in enumerate(noted):
        request, row = note["request"], note["prefix"] - 1
        expected, unadapted = states[request][row], own[request][row]
        # other kernels, the same numbers in float32
        assert (note["hidden"] - expected).abs().max() < 5e-4 * expected.abs().max(), (request, row)
        assert index > 4 or (note["hidden"] - unadapted).abs().max() > 0.05 * unadapted.abs().max(), (request, row)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_chat_over_http(tmp_path: Path, name: str) -> None:
    model = make_model(name, tmp_path / "target")
    fit_head(tmp_path / "head", model.reference, model.sizes, [[70, 71, 72]], 12)
    command = [str(tmp_path / "target"), "--dtype", "float32", "--enforce-eager", "--max-model-len", "256"]
    command += ["--kv-cache-memory-bytes", str(1 << 26), "--served-model-name", "m"]
    command += ["--speculative-config", json.dumps({"method": "mtpc", "model": str(tmp_path / "head")})]
    body = {"model": "m", "messages": MESSAGES, "temperature": 0, "max_tokens": COUNT, "ignore_eos": True}
    with run_server(command, tmp_path / "log") as client:
        answer = client.send("/v1/chat/completions", body | {"return_token_ids": True}).json()
    prompt = answer["prompt_token_ids"]
    assert answer["choices"][0]["token_ids"] == model.reference.greedy(prompt, COUNT)
    if name == "byte_llama":  # at the end: assistant, end of header, two line breaks in one token
        assert [prompt[0], *prompt[-3:]] == [256, 261, 257, 264]
    else:
        assert (
            bytes(index - 64 for index in prompt if index >= 64)
            == b"system\n\nuser\n\nWhich user, and why? \n\nassistant\n\n"
        )
