"""Both byte-level models: configuration, tensor parallelism, LoRA draft layers, chat over HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.byte_llama_reference import Reference, make_byte_llama, make_byte_target, make_texts
from tests.support.engine import Call, Engine, run
from tests.support.heads import ask_twice, check_greedy, check_twice, fit_head
from tests.support.models import random_layers
from vllm_mtpc.engine.server import run_server
from vllm_mtpc.errors import ServeConfigError
from vllm_mtpc.models.hooks import check_limits

MODELS = ("evabyte", "byte_llama")
COUNT = 30
GREEDY = {"temperature": 0, "max_tokens": COUNT, "ignore_eos": True}
SMALL_BLOCKS = {"max_model_len": 128, "block_size": 32}  # as small as vLLM's attention on a CPU takes
CHUNKS = {"max_num_batched_tokens": 24, "enable_chunked_prefill": True}
# blocks x (layers x heads x 2D x tokens + ids) x bytes: 6 blocks, where the five prompts and answers need 12
BYTES_OF_6_BLOCKS = 6 * (2 * 2 * 64 * 32 + 2 * 32) * 4
MESSAGES = [{"role": "user", "content": "Which user, and why? \n\n"}]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders evabyte/target and byte_llama/target."""
    folder = tmp_path_factory.mktemp("served")
    for name in MODELS:
        make_byte_target(name, folder / name / "target")
    return folder


def engine_config(model: Path, **arguments: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    import vllm_mtpc.plugin

    vllm_mtpc.plugin.register()
    return EngineArgs(model=str(model), dtype="float32", **arguments).create_engine_config()


def test_configuration_needs_no_remote_code(models: Path) -> None:
    from vllm.tokenizers.registry import cached_tokenizer_from_config

    evabyte = engine_config(models / "evabyte" / "target").model_config
    assert evabyte.architecture == "EvaByteForCausalLM"
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
        ("evabyte", {"hf_overrides": {"num_key_value_heads": 2}}, "num_key_value_heads=2"),
        ("evabyte", {"hf_overrides": {"window_size": 30}}, "multiples of chunk_size"),
        ("evabyte", {"hf_overrides": {"norm_add_unit_offset": False}}, "norm_add_unit_offset=False"),
        ("byte_llama", {"pipeline_parallel_size": 2}, "--pipeline-parallel-size 2"),
        ("byte_llama", {"enable_prompt_embeds": True}, "--enable-prompt-embeds"),
        ("byte_llama", {"hf_overrides": {"expand_input_ids": False}}, "plain Llama"),
        ("byte_llama", {"hf_overrides": {"add_qk_norm": True}}, "add_qk_norm=true.*allowed: false"),
    ],
)
def test_option_that_the_model_lacks_is_refused(models: Path, model: str, arguments: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        engine_config(models / model / "target", **arguments)


def test_ptp_head_is_refused() -> None:
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=1), speculative_config=SimpleNamespace(method="ptp")
    )
    with pytest.raises(ServeConfigError, match=r"'ptp' with EvaByte .*use an MtPC head"):
        check_limits(config, "EvaByte")


@pytest.fixture(scope="module")
def byte_llama(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("byte_llama")
    texts = make_texts()
    make_byte_llama(folder / "target", texts)
    reference = Reference(folder / "target")
    prompts = [text[:length] for text, length in zip(texts, (3, 20, 33, 48, 60), strict=False)]
    fit_head(folder / "head", reference, reference.llama.config.to_dict(), prompts, COUNT // 2)
    btree = {"speculative_config": {"method": "mtpc", "model": str(folder / "head")}}
    return SimpleNamespace(
        model=str(folder / "target"), folder=folder, btree=btree, reference=reference, prompts=prompts
    )


@pytest.mark.parametrize("context", [1, 4])
def test_reference_with_a_shorter_context_is_noticed(byte_llama: SimpleNamespace, context: int) -> None:
    shorter = Reference(byte_llama.folder / "target", context)
    answers = [byte_llama.reference.greedy(prompt, 12) for prompt in byte_llama.prompts]
    assert not all(shorter.is_greedy(*pair) for pair in zip(byte_llama.prompts, answers, strict=True))


def test_text_with_chunks_preemption_and_prefix_on_v1(byte_llama: SimpleNamespace) -> None:
    prompts, last = byte_llama.prompts, byte_llama.prompts[-1:]
    # min_tokens and the stale stop ids of generation_config.json would end the engine
    careful = {"temperature": 0, "min_tokens": COUNT, "max_tokens": COUNT}
    calls = [*ask_twice(prompts, GREEDY), Call(last, [careful])]
    arguments = SMALL_BLOCKS | CHUNKS | byte_llama.btree | {"kv_cache_memory_bytes": BYTES_OF_6_BLOCKS}
    *replies, third = run({"btree": Engine(byte_llama.model, calls, arguments)}, "v1")["btree"]
    check_twice(byte_llama.reference, prompts, replies, COUNT)
    check_greedy(byte_llama.reference, last, [third], COUNT)
    assert replies[0].metrics["vllm:num_preemptions"] > 0


def test_text_with_chunks_and_prefix_on_v2(byte_llama: SimpleNamespace) -> None:
    prompts = byte_llama.prompts[2:]
    engine = Engine(byte_llama.model, ask_twice(prompts, GREEDY), SMALL_BLOCKS | CHUNKS | byte_llama.btree)
    check_twice(byte_llama.reference, prompts, run({"btree": engine}, "v2")["btree"], COUNT)


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("name", MODELS)
def test_text_with_two_tensor_parallel_ranks(tmp_path: Path, name: str, runner: str) -> None:
    model = make_byte_target(name, tmp_path / "target")
    prompts = [model.texts[0][:31], model.texts[1]]
    fit_head(tmp_path / "head", model.reference, model.sizes, prompts, COUNT // 2)
    arguments = {"tensor_parallel_size": 2, "max_model_len": 128}
    arguments |= {"speculative_config": {"method": "mtpc", "model": str(tmp_path / "head")}}
    arguments |= {"block_size": 32} if name == "evabyte" else {}  # divides the window: past ones are freed
    engine = Engine(str(tmp_path / "target"), [Call(prompts, [GREEDY] * 2)], arguments)
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "TORCHDYNAMO_DISABLE": "1"}
    replies = run({"btree": engine}, runner, async_scheduling=runner == "v2", **environment)["btree"]
    check_greedy(model.reference, prompts, replies, COUNT)
    assert 0 < replies[0].accepted < replies[0].drafted


@pytest.mark.slow
@pytest.mark.parametrize(("name", "block"), [("evabyte", 16), ("byte_llama", 32)])
def test_head_reads_states_of_draft_layers_on_v2(tmp_path: Path, name: str, block: int) -> None:
    """They are those of transformers: in chunks, after rejected drafts and cached prefixes."""
    model = make_byte_target(name, tmp_path / "target")
    reference, prompts = model.reference, [text[:70] for text in model.texts[:2]]
    layers = random_layers(tmp_path / "target", 1)
    adapted = SimpleNamespace(hidden=lambda text: layers.draft(layers.trunk(torch.tensor([text])))[0].detach())
    fit_head(tmp_path / "head", reference, model.sizes, prompts, COUNT // 2, adapted, layers.adapters)
    arguments = {"max_model_len": 128, "max_num_batched_tokens": 24, "enable_chunked_prefill": True}
    # a draft in every step: a plan by the clock may choose none
    head = {"method": "mtpc", "model": str(tmp_path / "head"), "num_speculative_tokens_per_batch_size": "off"}
    arguments |= {"speculative_config": head, "block_size": block}
    engine = Engine(str(tmp_path / "target"), ask_twice(prompts, GREEDY), arguments, "noted states")
    replies = run({"layers": engine}, "v2")["layers"]
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
    model = make_byte_target(name, tmp_path / "target")
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
        shown = bytes(index - 64 for index in prompt if index >= 64)
        assert shown == b"system\n\nuser\n\nWhich user, and why? \n\nassistant\n\n"
