"""`vllm serve` of both byte-level models with a head, and what their configuration refuses."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import byte_llama_reference, evabyte_reference
from tests.support.heads import fit_head
from vllm_mtpc.errors import ServeConfigError
from vllm_mtpc.models.hooks import check_limits

COUNT = 24
MESSAGES = [{"role": "user", "content": "Which user, and why? \n\n"}]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders evabyte/target and byte_llama/target."""
    folder = tmp_path_factory.mktemp("served")
    evabyte_reference.make_evabyte(folder / "evabyte" / "target")
    byte_llama_reference.make_byte_llama(folder / "byte_llama" / "target", byte_llama_reference.make_texts())
    return folder


def engine_config(model: Path, **arguments: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    import vllm_mtpc.plugin

    vllm_mtpc.plugin.register()
    return EngineArgs(model=str(model), dtype="float32", **arguments).create_engine_config()


def test_configuration_needs_no_remote_code(models: Path) -> None:
    from vllm.tokenizers.registry import cached_tokenizer_from_config

    evabyte = engine_config(models / "evabyte" / "target").model_config
    assert (evabyte.architecture, evabyte.tokenizer_mode, evabyte.trust_remote_code) == (
        "EvaByteForCausalLM", "evabyte", False
    )  # fmt: skip
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
        ("evabyte", {"tensor_parallel_size": 3}, "--tensor-parallel-size 3 .* divisors of 4"),
        ("evabyte", {"pipeline_parallel_size": 2}, "--pipeline-parallel-size 2"),
        ("evabyte", {"hf_overrides": {"attention_class": "softmax"}}, "attention_class='softmax'.*allowed: 'eva'"),
        ("byte_llama", {"pipeline_parallel_size": 2}, "--pipeline-parallel-size 2"),
        ("byte_llama", {"enable_prompt_embeds": True}, "--enable-prompt-embeds"),
        ("byte_llama", {"hf_overrides": {"add_qk_norm": True}}, "add_qk_norm=true.*allowed: false"),
    ],
)
def test_refusals(models: Path, model: str, arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        engine_config(models / model / "target", **arguments)


@pytest.mark.parametrize("name", ["EvaByte", "a byte-level Llama"])
def test_heads_of_rows_that_are_no_tokens_are_refused(name: str) -> None:
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=1), speculative_config=SimpleNamespace(method="ptp")
    )
    with pytest.raises(ServeConfigError, match=f"'ptp' with {name} .*use an MtPC head"):
        check_limits(config, name)


def ask(port: int, server: subprocess.Popen[bytes], log: Path) -> dict[str, Any]:
    """One chat completion, as soon as the server answers."""
    body = {"model": "m", "messages": MESSAGES, "temperature": 0, "max_tokens": COUNT, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body | {"return_token_ids": True}).encode(),
        {"Content-Type": "application/json"},
    )
    for _ in range(480):
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)
        except (urllib.error.URLError, ConnectionError):
            if server.poll() is not None:
                break
            time.sleep(0.5)
    raise AssertionError(log.read_text()[-4000:])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["evabyte", "byte_llama"])
def test_chat_over_http(models: Path, name: str) -> None:
    target = models / name / "target"
    module = {"evabyte": evabyte_reference, "byte_llama": byte_llama_reference}[name]
    if name == "evabyte":
        reference = module.Reference(evabyte_reference.make_evabyte(target))
        sizes = evabyte_reference.SIZES
    else:
        reference = module.Reference(target)
        sizes = reference.llama.config.to_dict()
    fit_head(target.parent / "head", reference, sizes, [[70, 71, 72]], 12)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(target), "--port", str(port)]
    command += ["--served-model-name", "m", "--dtype", "float32", "--enforce-eager", "--max-model-len", "256"]
    command += ["--kv-cache-memory-bytes", str(1 << 26), "--host", "127.0.0.1"]
    command += ["--speculative-config", json.dumps({"method": "mtpc", "model": str(target.parent / "head")})]
    log = target.parent / "log"
    with open(log, "wb") as written, subprocess.Popen(command, stdout=written, stderr=written) as server:
        try:
            answer = ask(port, server, log)
        finally:
            server.terminate()
            server.wait(60)
    prompt, spoken = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
    assert spoken == reference.greedy(prompt, COUNT)
    if name == "byte_llama":
        assert prompt[0] == 256
        assert prompt[-3:] == [261, 257, 264]  # assistant, end of header, two line breaks in one token
    else:
        assert (
            bytes(index - 64 for index in prompt if index >= 64)
            == b"system\n\nuser\n\nWhich user, and why? \n\nassistant\n\n"
        )
