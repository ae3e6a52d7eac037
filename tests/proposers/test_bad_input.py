"""Bad input: one line before the engine starts, with the given value, the allowed ones, and what to type."""

from __future__ import annotations

import ast
import json
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from transformers import Qwen3NextConfig

from tests.support.configs import engine_config
from vllm_mtpc.errors import MtpcError
from vllm_mtpc.plan.draft_schedule import KEY
from vllm_mtpc.proposers.options import ptp_options
from vllm_mtpc.proposers.options.circuit_options import BEFORE_NORM
from vllm_mtpc.proposers.options.ptp_options import choose_attention
from vllm_mtpc.proposers.options.versions import vllm_minor

PIPELINE = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}


def rewrite(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def set_runner(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    import vllm.config.vllm

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(version - 1))
    monkeypatch.setattr(vllm.config.vllm, "HAS_TRITON", True)  # required by a V2 config; nothing runs here


def configured(place: Path, head: str = "head", engine: dict[str, Any] | None = None, /, **options: Any) -> Any:
    """Return the configuration of an engine with this head and these options of `speculative_config`."""
    method = "ptp" if head in ("o-ptp", "late") else "mtpc"
    return engine_config(place / "target", {"method": method, "model": str(place / head), **options}, **(engine or {}))


def served(*given: Any, **options: Any) -> Any:
    return configured(*given, **options).speculative_config


def refusal(*given: Any, **options: Any) -> str:
    """Return the message that such an engine is refused with."""
    with pytest.raises(MtpcError) as caught:
        configured(*given, **options)
    message = str(caught.value)
    assert "\n" not in message, message
    return message


@dataclass
class Case:
    """A head, options and changes of files, and parts of the message (by " .. ") that they are refused with."""

    wanted: str
    head: str = "head"
    options: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    target: dict[str, Any] = field(default_factory=dict)  # changes of config.json
    config: dict[str, Any] = field(default_factory=dict)
    runner: int = 0  # 0: the default, V1 for circuits on a CPU and V2 for PTP


def options(wanted: str, head: str = "head", /, **given: Any) -> Case:
    return Case(wanted, head, given)


def connector(is_layerwise: bool) -> dict[str, Any]:
    extra = {"use_layerwise": is_layerwise}
    return {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both", "kv_connector_extra_config": extra}


MIMO = {"model_type": "qwen2", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
GEMMA = {"model_type": "gemma", "architectures": ["GemmaForCausalLM"], "hidden_activation": "gelu_pytorch_tanh"}
BLOOM = {"model_type": "bloom", "architectures": ["BloomForCausalLM"]}
MIXTRAL = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
SLIDING = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 16}
BAD_SCHEDULES: list[tuple[Any, str]] = [
    ("on", "must be a non-empty list"),
    (4, "must be a non-empty list"),
    ([], "must not be empty"),
    ([[1, 8]], "must be a 3-item sequence"),
    ([[1, 8, None]], "int() argument"),
    ([[1, 8, 5]], "5 drafts are more than num_speculative_tokens"),
    ([[1, 8, -1]], "must be >= 0"),
    ([[2, 8, 1]], "must start at 1"),
    ([[1, 8, 2], [8, 9, 1]], "non-overlapping"),
    ([[8, 1, 2]], "start must be <= end"),
]
CASES = [
    # values of options
    *[options(f"num_speculative_tokens={k} .. 1 to 4", num_speculative_tokens=k) for k in (0, -1, 5, 2.5, "3")],
    *[options(f"num_speculative_tokens={k} .. 1 to 4", "o-ptp", num_speculative_tokens=k) for k in (0, 5, "2")],
    *[options("'min_acceptance'", min_acceptance=value) for value in (-0.1, 1, "high")],
    *[options(f"{key!r} .. num_speculative_tokens", **{key: "x"})
      for key in ("quantization", "parallel_drafting", "typo", "head")],
    *[options(f"{key!r} .. draft_pass", "o-ptp", **{key: "x"})
      for key in ("draft_sample_method", "rejection_sample_method", "typo", "head")],
    *[options(key, "o-ptp", **{key: value}) for key, value in
      {"draft_pass": "three", "max_aux_rows": 1, "aux_rows_per_request": 0}.items()],
    options("draft_sample_method", draft_sample_method="beam"),
    options("head_dtype .. 'bfloat16'", head_dtype="fp8"),
    options("'verify'", verify="maybe"),
    options("Model Runner V1 .. 'standard'", rejection_sample_method="block"),
    *[options(f"{rule!r} .. verify='coupled' .. 'standard'", rejection_sample_method=rule, verify="coupled")
      for rule in ("block", "synthetic")],
    *[options(f"{rule!r} .. distribution .. standard, block, synthetic", rejection_sample_method=rule)
      for rule in ("fly", "lenient")],
    options("Model Runner V2 .. full CUDA graphs .. min_acceptance", enable_adaptive_verification=True),
    Case("min_acceptance=0.2 .. enable_adaptive_verification", options={"min_acceptance": 0.2}, runner=2),
    *[options(f"{KEY}={given!r} .. {reason} .. 0 to 4 drafts .. \"off\" .. type e.g.", **{KEY: given})
      for given, reason in BAD_SCHEDULES],
    # the head and its files
    options("is of method 'mtpc', not 'ptp' .. \"method\": \"mtpc\"", method="ptp"),
    options("is of method 'ptp', not 'mtpc'", "o-ptp", method="mtpc"),
    options("bundles no head in mtpc/", model=None),
    options("the folder does not exist", "nowhere"),
    options("is a file .. model.safetensors", "head/model.safetensors"),
    options("not a head's config", "target"),
    Case("vocab_size=33 .. target", "vocab"),
    Case("hidden_size=96 .. target", "hidden"),
    Case("unknown key 'widnow' .. window", config={"widnow": 8}),
    # the target
    Case("MiMoForCausalLM, which returns hidden states from before its final norm .. "
         '{"method": "mtp", "num_speculative_tokens": 1}', target=MIMO),
    Case("from before its final norm", "late", target=MIMO, runner=2),
    Case("full attention .. MtPC", "o-ptp", target=SLIDING),
    Case("is GemmaForCausalLM .. LlamaForCausalLM .. lora_layers 0", "layered", target=GEMMA),
    Case("a target with 2 layers .. has 3", "layered", target={"num_hidden_layers": 3}),
    Case("does not return the states", "backbone", target=BLOOM),
    Case("reads drafter mtp of the target, which vLLM .. refuses .. use a head of another kind", "hosted", runner=2),
    Case("drafter: no folder .. nothing; copy the checkpoint there, or correct model", "lost", runner=2),
    Case("reads layer 2, but target", "backbone", target={"num_hidden_layers": 1},
         config={"aux_hidden_state_layer_ids": [0, 2]}),
    # the engine
    Case("lora_layers=1 on Model Runner V1 .. allowed: Model Runner V2", "layered", runner=1),
    Case("kind 'backbone' on Model Runner V1 .. allowed: Model Runner V2", "backbone", runner=1),
    Case("allowed head_dtype: auto; given: bfloat16; remove", "backbone", {"head_dtype": "bfloat16"}),
    Case("with backbone_heads=3, which tensor_parallel_size=2 does not divide", "uneven",
         engine={"tensor_parallel_size": 2}),
    Case("Model Runner V1 .. allowed: Model Runner V2 .. type scripts/v2_on_cpu.sh vllm serve .. MtPC", "o-ptp",
         runner=1),
    Case("max_model_len 'auto'", "o-ptp", engine={"max_model_len": -1}),
    Case("data_parallel_size on a mixture of experts", "o-ptp", engine={"data_parallel_size": 2}, target=MIXTRAL),
    Case("lora_layers=1 and enable_lora", "layered", engine={"enable_lora": True}, runner=2),
    Case("lora_layers=1 and decode_context_parallel_size", "layered", target={"num_key_value_heads": 1},
         engine={"tensor_parallel_size": 2, "decode_context_parallel_size": 2}, runner=2),
    Case("lora_layers=1 and a KV connector that works layer by layer: .. drop", "layered",
         engine={"kv_transfer_config": connector(is_layerwise=True)}, runner=2),
    pytest.param(Case("pipeline_parallel_size=2", engine=PIPELINE),
                 marks=pytest.mark.feature("pipeline parallel", "refused", "mtpc on V1")),
    pytest.param(Case("pipeline_parallel_size=2 .. tensor_parallel_size", "o-ptp", engine=PIPELINE),
                 marks=pytest.mark.feature("pipeline parallel", "refused", "ptp on V2")),
    pytest.param(Case("enable_lora", "o-ptp", engine={"enable_lora": True}),
                 marks=pytest.mark.feature("LoRA requests on the target", "refused", "ptp on V2")),
    pytest.param(options("'mask_drafts' is not an option of method 'ptp'", "o-ptp", mask_drafts=True),
                 marks=pytest.mark.feature("drafts masked with the grammar", "refused", "ptp on V2",
                                           why="not an option of ptp")),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.head}: {case.wanted[:40]}")
def test_bad_input_is_refused_in_one_line(case: Case, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if runner := case.runner or (2 if case.head == "o-ptp" else 0):
        set_runner(monkeypatch, runner)
    if case.target:
        rewrite(place / "target" / "config.json", **case.target)
    if case.config:
        rewrite(place / case.head / "config.json", **case.config)
    message = refusal(place, case.head, case.engine, **case.options)
    for part in case.wanted.split(" .. "):
        assert part in message


@pytest.mark.parametrize(("head", "file"), [("head", "model.safetensors"), ("o-ptp", "adapter_model.safetensors")])
def test_damaged_tensors_are_refused(place: Path, head: str, file: str) -> None:
    """Before a worker starts; tests/checkpoint/test_bad_heads.py has every kind of damage."""
    (place / head / file).write_bytes((place / head / file).read_bytes()[:-8])
    assert file in refusal(place, head)


@pytest.mark.parametrize("head", ["head", "o-ptp"])
def test_recurrent_target_is_refused_and_served_without_its_bundled_head(
    place: Path, head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3-Next has linear attention in three of four layers; greedy text with drafts differed from plain vLLM's."""
    Qwen3NextConfig(
        vocab_size=32, hidden_size=64, num_hidden_layers=4, intermediate_size=64, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        architectures=["Qwen3NextForCausalLM"],
    ).save_pretrained(place / "target")  # fmt: skip
    message = refusal(place, head)
    assert "is Qwen3NextForCausalLM, which has recurrent layers" in message and "drop speculative_config" in message
    shutil.copytree(place / head, place / "target" / "mtpc")
    monkeypatch.delenv("MTPC_AUTO", raising=False)
    warned: list[str] = []
    monkeypatch.setattr("vllm_mtpc.proposers.patches.vllm_patches.warn", lambda *given: warned.append(str(given[1])))
    config = engine_config(place / "target", None)
    assert config.speculative_config is None and "vllm_mtpc" not in config.parallel_config.worker_cls
    assert len(warned) == 1 and "recurrent layers" in warned[0]


@pytest.mark.slow
def test_list_of_targets_that_norm_in_compute_logits_matches_vllm() -> None:
    """A class that is no drafter is listed if it calls `norm` there, or is made of one that does."""
    import vllm
    from vllm.model_executor.models.registry import ModelRegistry

    found, root = set(), Path(vllm.__file__).parent
    for file in [*root.glob("model_executor/models/**/*.py"), *root.glob("models/**/*.py")]:
        if "norm(" not in (text := file.read_text(encoding="utf-8")):
            continue
        for one in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)):
            methods = [node for node in one.body if isinstance(node, ast.FunctionDef) and node.name == "compute_logits"]
            if any("norm" in ast.unparse(method) for method in methods):
                found.add(one.name)
    drafters = {name for name in found if "DSpark" in name or "MTP" in name or "MultiToken" in name}
    wrapped = {f"{name}ForConditionalGeneration" for name in ("Step3p7", "Step5", "KimiK3")}
    known = ModelRegistry.get_supported_archs()
    assert found - drafters | wrapped & known == set(BEFORE_NORM) & known
    assert set(BEFORE_NORM) <= known or vllm_minor() < (0, 33)  # Step 5


def test_target_with_wider_states_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As DeepSeek V4: vLLM sizes a speculator's buffers by them."""
    from vllm.model_executor.model_loader import utils

    rewrite(place / "target" / "config.json", hc_mult=4)
    served(place)  # its states have one copy
    wide = type("Model", (), {"get_mtp_target_hidden_states": lambda self: None})
    monkeypatch.setattr(utils, "get_model_cls", lambda target: wide)
    message = refusal(place)
    assert "returns hidden states of 4 x 64 numbers" in message and "hidden_size=64" in message


def test_backbone_on_a_target_with_compressed_keys_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config.model import ModelConfig

    set_runner(monkeypatch, 2)
    served(place, "backbone")
    monkeypatch.setattr(ModelConfig, "use_mla", property(lambda self: True))
    message = refusal(place, "backbone")
    assert "keeps compressed keys and values (MLA); use a head of another kind" in message


@pytest.mark.parametrize(("option", "value"), [("pipeline_parallel_size", 2), ("enable_dbo", True)])
def test_option_that_a_cpu_lacks_is_refused_with_draft_layers(
    place: Path, option: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_runner(monkeypatch, 2)
    config = configured(place, "layered", {"kv_transfer_config": connector(is_layerwise=False)})
    config.scheduler_config.async_scheduling = True
    setattr(config.parallel_config, option, value)
    with pytest.raises(MtpcError, match=f"lora_layers=1 and {option}"):
        config.speculative_config.check_engine(config)


def test_pipeline_stages_need_asynchronous_scheduling(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_runner(monkeypatch, 2)
    config = configured(place)
    config.parallel_config.pipeline_parallel_size, config.scheduler_config.async_scheduling = 2, True
    config.speculative_config.check_engine(config)
    config.scheduler_config.async_scheduling = False
    with pytest.raises(MtpcError, match=r"allowed: .* asynchronous scheduling; drop --no-async-scheduling"):
        config.speculative_config.check_engine(config)


def test_too_small_a_cache_is_refused_with_ptp(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_runner(monkeypatch, 2)
    config = configured(place, "o-ptp", {"max_num_seqs": 8})
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=32))
    cache = SimpleNamespace(num_blocks=10_000, kv_cache_groups=[group])
    reserved = config.speculative_config.reserved_blocks(config, cache)
    assert reserved > 0
    cache.num_blocks = reserved + 2  # a request of 64 tokens needs 3
    with pytest.raises(MtpcError, match="max_aux_rows") as caught:
        config.speculative_config.reserved_blocks(config, cache)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("draft_pass", ["merged", "two-pass"])
@pytest.mark.parametrize(
    ("capability", "named", "chosen"),  # 0: a CPU
    [(0, None, None), (90, None, None), (100, None, "FLASH_ATTN"), (100, "TRITON_ATTN", "TRITON_ATTN")],
)
def test_flash_attn_replaces_flashinfer_unless_named(
    draft_pass: str, capability: int, named: str | None, chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum as Backend

    platform = {"is_cuda": lambda: capability > 0, "is_device_capability_family": lambda asked: asked == capability}
    monkeypatch.setattr(ptp_options, "current_platform", SimpleNamespace(**platform))
    config = SimpleNamespace(backend=named and Backend[named])
    choose_attention(config, draft_pass)
    assert config.backend is (chosen and Backend[chosen])


@pytest.mark.parametrize(("backend", "mode", "lines"), [
    ("FLASHINFER", "FULL_AND_PIECEWISE", 1), ("FLASHINFER", "NONE", 0), ("FLASH_ATTN", "FULL_AND_PIECEWISE", 0)
])  # fmt: skip
def test_drafts_without_graphs_log_one_warning(
    backend: str, mode: str, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config.compilation import CUDAGraphMode

    from vllm_mtpc.proposers.v2.ptp import ptp_speculator as module

    logged, modes = list[str](), list[Any]()
    monkeypatch.setattr(module.logger, "warning", lambda text, *values: logged.append(text % values))
    monkeypatch.setattr(module, "DraftGraphs", lambda config, device, mode, *more: modes.append(mode))
    group = mock.Mock()
    group.backend.get_name.return_value = backend
    made = mock.Mock(aux_groups=[[group]], max_num_reqs=2, late=None, **{"plan.bucket.return_value": None})
    module.PtpSpeculator.init_cudagraph_manager(made, CUDAGraphMode[mode])
    assert len(logged) == lines and all("FLASHINFER" in line and "--attention-backend" in line for line in logged)
    assert modes == [CUDAGraphMode[mode if backend == "FLASH_ATTN" else "NONE"]]


def test_defaults_of_a_circuit_head(place: Path) -> None:
    assert served(place).draft_sample_method == "probabilistic"
    rewrite(place / "head" / "config.json", draft_sample_method="greedy")
    assert served(place).draft_sample_method == "greedy"
    spec = served(place, draft_sample_method="probabilistic", head_dtype="float16")
    assert (spec.draft_sample_method, spec.head_dtype) == ("probabilistic", "float16")


def test_defaults_of_a_ptp_head(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_runner(monkeypatch, 2)
    chosen: list[str] = []
    monkeypatch.setattr(ptp_options, "choose_attention", lambda config, draft_pass: chosen.append(draft_pass))
    config = configured(place, "o-ptp")
    spec = config.speculative_config
    assert spec.num_speculative_tokens == 4 and spec.draft_pass == "two-pass"
    assert "variant='o-ptp'" in repr(spec) and chosen == ["two-pass"]
    assert config.cache_config.block_size == 32  # on a CPU: groups own blocks, so small ones
    assert engine_config(place / "o-ptp", None).speculative_config.method == "ptp"
    rewrite(place / "target" / "config.json", **MIMO)  # without a late network rows go through the target's own norm
    assert served(place, "o-ptp").head.late_width is None


def test_schedule_is_kept_on_v1_and_block_verification_on_v2(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.33 drops schedules on V1 for methods that it does not list."""
    assert served(place, **{KEY: [[1, 4, 3]]}).num_speculative_tokens_per_batch_size[0] == (1, 4, 3)
    set_runner(monkeypatch, 2)
    assert served(place, rejection_sample_method="block", min_acceptance=0).rejection_sample_method == "block"


def test_backbone_reserves_slots_for_its_queries(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as the window has tokens, not 1 + K."""
    set_runner(monkeypatch, 2)
    config = configured(place, "backbone", num_speculative_tokens=2)
    assert config.speculative_config.speculator().startswith("backbone") and config.speculative_config.aux_layers
    assert config.num_lookahead_tokens == 5
    assert engine_config(place / "target", None).num_lookahead_tokens == 0


def test_head_folder_serves_its_target(place: Path) -> None:
    made = engine_config(place / "head", None)
    assert made.model_config.model == made.model_config.tokenizer == str((place / "target").resolve())
    assert made.speculative_config.head.circuit == "btree" and made.speculative_config.num_speculative_tokens == 4
    spec = engine_config(place / "head", {"num_speculative_tokens": 2, "draft_sample_method": "greedy"})
    assert spec.speculative_config.num_speculative_tokens == 2
    assert spec.speculative_config.draft_sample_method == "greedy"
    rewrite(place / "head" / "config.json", speculators_config={"proposal_methods": []})
    with pytest.raises(MtpcError, match="speculators_config") as caught:  # before vLLM reads it
        engine_config(place / "head", None)
    assert "\n" not in str(caught.value)


def test_error_ends_the_vllm_command_in_one_line(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def original(*error: Any) -> None:
        print("a traceback", file=sys.stderr)

    monkeypatch.setattr(sys, "excepthook", original)
    refusal(place, "nowhere")
    assert sys.excepthook is original, "a script keeps its tracebacks"
    monkeypatch.setattr(sys, "argv", ["/usr/bin/vllm", "serve"])
    message = refusal(place, "nowhere")
    capsys.readouterr()
    sys.excepthook(MtpcError, MtpcError(message), None)
    assert capsys.readouterr().err == f"vllm: error: {message}\n"
    sys.excepthook(KeyError, KeyError("x"), None)
    assert capsys.readouterr().err == "a traceback\n"
