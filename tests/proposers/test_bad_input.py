"""Bad input: one line, at start, in the caller's process, with what was given, what is allowed, what to type."""

from __future__ import annotations

import ast
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, Qwen3NextConfig

from tests.support.configs import engine_config, refusal, write_head
from tests.support.models import make_ptp_head, random_layers
from vllm_mtpc.checkpoint import read_config, save_head
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.errors import MtpcError
from vllm_mtpc.heads import build_head
from vllm_mtpc.proposers.config.refusals import BEFORE_NORM
from vllm_mtpc.proposers.config.versions import vllm_minor


def rewrite(place: Path, **changes: Any) -> None:
    file = place / "head" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_good_head_is_accepted_with_its_defaults(place: Path) -> None:
    spec = engine_config(place / "target", {"method": "mtpc", "model": str(place / "head")}).speculative_config
    assert spec.num_speculative_tokens == 4 and spec.draft_sample_method == "probabilistic"
    assert "circuit='btree'" in repr(spec)


def test_a_head_may_name_greedy_drafts_as_its_default(place: Path) -> None:
    rewrite(place, draft_sample_method="greedy")
    given = {"method": "mtpc", "model": str(place / "head")}
    assert engine_config(place / "target", given).speculative_config.draft_sample_method == "greedy"
    asked = {**given, "draft_sample_method": "probabilistic"}
    assert engine_config(place / "target", asked).speculative_config.draft_sample_method == "probabilistic"


@pytest.fixture
def with_backbone(place: Path) -> Path:
    """The same folder; its head has a backbone."""
    target = json.loads((place / "target" / "config.json").read_text())
    write_head(place / "head", target, head="backbone", component_rank=2, backbone_layers=1, backbone_kv_heads=2)
    return place


def test_a_backbone_has_slots_for_its_queries(with_backbone: Path) -> None:
    from vllm.config import VllmConfig
    from vllm.config.parallel import ParallelConfig
    from vllm.engine.arg_utils import EngineArgs

    given = {"method": "mtpc", "model": str(with_backbone / "head"), "num_speculative_tokens": 2}
    args = EngineArgs(str(with_backbone / "target"), speculative_config=given, dtype="float32")
    spec = args.create_speculative_config(args.create_model_config(), ParallelConfig())
    assert spec.speculator() == "backbone_speculator.BackboneSpeculator" and spec.aux_layers
    slots = VllmConfig.num_lookahead_tokens.fget
    assert slots(SimpleNamespace(speculative_config=spec)) == 5  # as many as the window has tokens, not 1 + K
    assert slots(SimpleNamespace(speculative_config=None)) == 0


def test_a_backbone_on_model_runner_v1(with_backbone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    message = refusal(with_backbone)
    assert "kind 'backbone' on Model Runner V1" in message and "allowed: Model Runner V2" in message


@pytest.mark.parametrize(
    ("target", "head", "wanted"),
    [
        ({"model_type": "bloom", "architectures": ["BloomForCausalLM"]}, {}, "does not hand out the states"),
        ({"num_hidden_layers": 1}, {"aux_hidden_state_layer_ids": [0, 2]}, "reads layer 2, but target"),
    ],
)
def test_a_backbone_on_other_targets(
    with_backbone: Path, target: dict[str, Any], head: dict[str, Any], wanted: str
) -> None:
    rewrite(with_backbone, **head)
    file = with_backbone / "target" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **target}))
    assert wanted in refusal(with_backbone)


def test_a_backbone_has_the_dtype_of_its_target(with_backbone: Path) -> None:
    assert "allowed head_dtype: auto; given: bfloat16; remove" in refusal(with_backbone, head_dtype="bfloat16")


def test_a_backbone_that_ranks_do_not_divide(with_backbone: Path) -> None:
    target = json.loads((with_backbone / "target" / "config.json").read_text())
    options = {"component_rank": 2, "backbone_layers": 1, "backbone_heads": 3, "backbone_kv_heads": 1}
    write_head(with_backbone / "head", target, head="backbone", **options)
    given = {"method": "mtpc", "model": str(with_backbone / "head")}
    with pytest.raises(MtpcError, match=r"with backbone_heads=3, which tensor_parallel_size=2 does not divide"):
        engine_config(with_backbone / "target", given, tensor_parallel_size=2)


@pytest.fixture
def layered(place: Path) -> Path:
    """The same folder; its head has draft layers."""
    target = json.loads((place / "target" / "config.json").read_text())
    settings = {"circuit": "ff", "window": 4, "num_components": 1, "target": target, "verifier": "../target"}
    config = HeadConfig.create(**settings, lora_layers=1)
    layers = random_layers(place / "target", 1)
    save_head(place / "head", config, build_head(config), {"command": "tests"}, "test", draft_layers=layers)
    return place


def test_draft_layers_on_model_runner_v1(layered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    message = refusal(layered)
    assert "lora_layers=1 on Model Runner V1" in message and "allowed: Model Runner V2" in message


def test_draft_layers_of_other_models(layered: Path) -> None:
    file = layered / "target" / "config.json"
    other = {"model_type": "gemma", "architectures": ["GemmaForCausalLM"], "hidden_activation": "gelu_pytorch_tanh"}
    file.write_text(json.dumps({**json.loads(file.read_text()), **other}))
    message = refusal(layered)
    assert "is GemmaForCausalLM" in message and "LlamaForCausalLM" in message and "lora_layers 0" in message


def test_targets_whose_states_come_before_their_norm(place: Path) -> None:
    file = place / "target" / "config.json"
    other = {"model_type": "qwen2", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    file.write_text(json.dumps({**json.loads(file.read_text()), **other}))
    message = refusal(place)
    assert "MiMoForCausalLM, which hands out hidden states from before its final norm" in message
    assert '{"method": "mtp", "num_speculative_tokens": 1}' in message


@pytest.mark.parametrize("head", ["mtpc", "ptp"])
def test_a_recurrent_target_is_refused_and_served_without_its_bundled_head(
    place: Path, head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3-Next: three of four layers are linear attention. Greedy text with drafts was not plain vLLM's there."""
    if head == "ptp":
        shutil.rmtree(place / "head")
        make_ptp_head(place / "head", LlamaForCausalLM.from_pretrained(place / "target"), "o-ptp", window=5)
    Qwen3NextConfig(
        vocab_size=32, hidden_size=64, num_hidden_layers=4, intermediate_size=64, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        architectures=["Qwen3NextForCausalLM"],
    ).save_pretrained(place / "target")  # fmt: skip
    message = refusal(place, method=head)
    assert "is Qwen3NextForCausalLM, which has recurrent layers" in message and "drop speculative_config" in message
    shutil.copytree(place / "head", place / "target" / "mtpc")
    monkeypatch.delenv("MTPC_AUTO", raising=False)
    warned: list[str] = []
    monkeypatch.setattr("vllm_mtpc.proposers.patches.frontend.warn", lambda *said: warned.append(str(said[1])))
    made = engine_config(place / "target", None)
    assert made.speculative_config is None and "vllm_mtpc" not in made.parallel_config.worker_cls
    assert len(warned) == 1 and "recurrent layers" in warned[0]


def test_vllm_norms_where_logits_are_computed_in_those_targets_alone() -> None:
    """Of models that are no drafters: a class is in the table if it calls `norm` there, or is made of one that does."""
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


@pytest.mark.parametrize("layerwise", [True, False])
def test_draft_layers_with_a_connector_that_works_layer_by_layer(layered: Path, layerwise: bool) -> None:
    from vllm.config import KVTransferConfig

    from vllm_mtpc.proposers.config.refusals import of_draft_layers, refuse

    connector = KVTransferConfig(
        kv_connector="LMCacheConnectorV1",
        kv_role="kv_both",
        kv_connector_extra_config={"use_layerwise": layerwise},
    )
    parallel = SimpleNamespace(pipeline_parallel_size=1, decode_context_parallel_size=1)
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(head=read_config(layered / "head"), has_backbone=False),
        use_v2_model_runner=True,
        parallel_config=parallel,
        lora_config=None,
        kv_transfer_config=connector,
    )
    if not layerwise:
        refuse(of_draft_layers(config))
        return
    with pytest.raises(MtpcError, match=r"lora_layers=1 and a KV connector that works layer by layer: .*drop"):
        refuse(of_draft_layers(config))


def test_a_target_that_hands_out_wider_states(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As DeepSeek V4 does: vLLM sizes a speculator's buffers by them."""
    from vllm.model_executor.model_loader import utils

    file = place / "target" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "hc_mult": 4}))
    engine_config(place / "target", {"method": "mtpc", "model": str(place / "head")})  # its states are as wide as ever
    handing = type("Model", (), {"get_mtp_target_hidden_states": lambda self: None})
    monkeypatch.setattr(utils, "get_model_cls", lambda target: handing)
    message = refusal(place)
    assert "hands out hidden states of 4 x 64 numbers" in message and "hidden_size=64" in message


def test_draft_layers_of_a_target_with_other_layers(layered: Path) -> None:
    file = layered / "target" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_hidden_layers": 3}))
    assert "a target with 2 layers" in (message := refusal(layered)) and "has 3" in message


@pytest.mark.parametrize(
    ("option", "value"),
    [("pipeline_parallel_size", 2), ("decode_context_parallel_size", 2), ("enable_dbo", True), ("enable_lora", True)],
)
def test_what_draft_layers_are_not_served_with(layered: Path, option: str, value: Any) -> None:
    from vllm_mtpc.proposers.config.refusals import of_draft_layers, refuse

    parallel = {"pipeline_parallel_size": 1, "decode_context_parallel_size": 1, "enable_dbo": False}
    engine = SimpleNamespace(
        use_v2_model_runner=True,
        speculative_config=SimpleNamespace(head=read_config(layered / "head"), has_backbone=False),
        parallel_config=SimpleNamespace(**parallel),
        lora_config=None,
        kv_transfer_config=None,
    )
    refuse(of_draft_layers(engine))
    setattr(*((engine, "lora_config", value) if option == "enable_lora" else (engine.parallel_config, option, value)))
    with pytest.raises(MtpcError, match=f"lora_layers=1 and {option}"):
        refuse(of_draft_layers(engine))


@pytest.mark.parametrize("head", ["shared", "mlp", "transformer"])
def test_every_head_is_accepted(place: Path, head: str) -> None:
    write_head(place / "head", json.loads((place / "target" / "config.json").read_text()), head=head)
    spec = engine_config(place / "target", {"method": "mtpc", "model": str(place / "head")}).speculative_config
    assert spec.head.head == head


def test_an_option_that_the_head_does_not_have(place: Path) -> None:
    rewrite(place, expander_rank=8)
    assert "expander_rank=8" in (message := refusal(place)) and "'linear'" in message


@pytest.mark.parametrize("drafts", [1, 2, 4])
def test_any_number_of_drafts_up_to_the_window(place: Path, drafts: int) -> None:
    given = {"method": "mtpc", "model": str(place / "head"), "num_speculative_tokens": drafts}
    assert engine_config(place / "target", given).speculative_config.num_speculative_tokens == drafts


@pytest.mark.parametrize("drafts", [0, -1, 5, 2.5, "3"])
def test_more_drafts_than_the_window(place: Path, drafts: Any) -> None:
    message = refusal(place, num_speculative_tokens=drafts)
    assert f"num_speculative_tokens={drafts}" in message and "1 to 4" in message


def test_unknown_circuit(place: Path) -> None:
    rewrite(place, circuit="tensor-train")
    assert "'tensor-train'" in (message := refusal(place)) and "ff, cp, hmm, btree" in message


@pytest.mark.parametrize(("key", "value"), [("vocab_size", 33), ("hidden_size", 96)])
def test_head_for_another_target(place: Path, key: str, value: int) -> None:
    target = json.loads((place / "target" / "config.json").read_text())
    write_head(place / "head", {**target, key: value})
    message = refusal(place)
    assert f"{key}={value}" in message and str(place / "target") in message


def test_missing_tensor(place: Path) -> None:
    change_tensors(place, lambda tensors: tensors.pop("inner_bias"))
    assert "missing: inner_bias" in refusal(place)


def test_extra_tensor(place: Path) -> None:
    change_tensors(place, lambda tensors: tensors.update(surplus=torch.zeros(2)))
    assert "unknown tensor(s): surplus" in (message := refusal(place)) and "leaf_weight" in message


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_tensor_with_nan(place: Path, value: float) -> None:
    change_tensors(place, lambda tensors: tensors["root_weight"][0].fill_(value))
    assert "'root_weight' holds NaN or infinity" in refusal(place)


def change_tensors(place: Path, change: Any) -> None:
    file = place / "head" / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file)


def test_wrong_format_version(place: Path) -> None:
    rewrite(place, format_version=3)
    assert "'format_version' = 3" in (message := refusal(place)) and "reads formats 1 and 2" in message


def test_unknown_config_key(place: Path) -> None:
    rewrite(place, widnow=8)
    assert "unknown key 'widnow'" in (message := refusal(place)) and "window" in message


def test_pickle_where_safetensors_is_expected(place: Path) -> None:
    (place / "head" / "model.safetensors").rename(place / "head" / "model@900.pt")
    assert "model@900.pt" in (message := refusal(place)) and "pickled weights are never loaded" in message
    message = refusal(place, model=str(place / "head" / "model@900.pt"))
    assert "is a file" in message and "model.safetensors" in message


def test_missing_head(place: Path) -> None:
    assert "the folder does not exist" in refusal(place, model=str(place / "nowhere"))


def test_a_target_is_not_a_head(place: Path) -> None:
    assert "not a head's config" in refusal(place, model=str(place / "target"))


def test_block_verification_is_refused_where_it_would_be_ignored(place: Path) -> None:
    message = refusal(place, rejection_sample_method="block")
    assert "Model Runner V1" in message and "'standard'" in message


@pytest.mark.parametrize("method", ["block", "synthetic"])
def test_coupling_leaves_nothing_to_reject(place: Path, method: str) -> None:
    message = refusal(place, rejection_sample_method=method, verify="coupled")
    assert repr(method) in message and "verify='coupled'" in message and "'standard'" in message
    assert "'verify'" in refusal(place, verify="maybe")


@pytest.mark.parametrize("method", ["fly", "lenient"])
def test_verification_that_does_not_keep_the_distribution_is_refused(place: Path, method: str) -> None:
    message = refusal(place, rejection_sample_method=method)
    assert repr(method) in message and "distribution" in message and "standard, block, synthetic" in message


def test_adaptive_verification_is_refused_where_vllm_has_none(place: Path) -> None:
    message = refusal(place, enable_adaptive_verification=True)
    assert "with a CPU" in message and "full CUDA graphs" in message and "min_survival" in message


@pytest.mark.parametrize("value", [-0.1, 1, "high"])
def test_min_survival_is_a_chance(place: Path, value: Any) -> None:
    assert "'min_survival'" in refusal(place, min_survival=value)


def test_min_survival_on_v2_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.config.vllm

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setattr(vllm.config.vllm, "HAS_TRITON", True)  # asked for when a config is made; nothing runs here
    assert "enable_adaptive_verification" in refusal(place, min_survival=0.2)
    given = {"method": "mtpc", "model": str(place / "head"), "rejection_sample_method": "block", "min_survival": 0}
    assert engine_config(place / "target", given).speculative_config.rejection_sample_method == "block"


@pytest.mark.parametrize("key", ["quantization", "parallel_drafting", "typo", "head"])
def test_an_option_of_other_methods_is_refused(place: Path, key: str) -> None:
    message = refusal(place, **{key: "x"})
    assert repr(key) in message and "num_speculative_tokens" in message


def test_unknown_value_of_an_option(place: Path) -> None:
    assert "draft_sample_method" in refusal(place, draft_sample_method="beam")


def test_a_head_of_the_other_method(place: Path) -> None:
    assert (
        "is of method 'mtpc', not 'ptp'" in (message := refusal(place, method="ptp")) and '"method": "mtpc"' in message
    )


def test_no_model_and_no_bundled_head(place: Path) -> None:
    assert "bundles no head in mtpc/" in refusal(place, model=None)


def test_bundled_head_needs_no_name(place: Path) -> None:
    shutil.copytree(place / "head", place / "target" / "mtpc")
    spec = engine_config(place / "target", {"method": "mtpc"}).speculative_config
    assert spec.model == str(place / "target" / "mtpc")


def test_a_head_folder_serves_its_verifier(place: Path) -> None:
    made = engine_config(place / "head", None)
    assert made.model_config.model == str((place / "target").resolve())
    assert made.speculative_config.head.circuit == "btree" and made.speculative_config.num_speculative_tokens == 4


def test_a_damaged_head_folder_is_refused_before_vllm_reads_it(place: Path) -> None:
    rewrite(place, speculators_config={"proposal_methods": []})
    with pytest.raises(MtpcError, match="speculators_config") as caught:
        engine_config(place / "head", None)
    assert "\n" not in str(caught.value)


def test_a_head_folder_with_options_of_the_user(place: Path) -> None:
    made = engine_config(place / "head", {"num_speculative_tokens": 2, "draft_sample_method": "greedy"})
    spec = made.speculative_config
    assert (spec.num_speculative_tokens, spec.draft_sample_method) == (2, "greedy")
    assert made.model_config.tokenizer == str((place / "target").resolve())


def test_a_schedule_is_kept_on_v1(place: Path) -> None:
    """vLLM 0.33 drops it but for methods of a list."""
    given = {"method": "mtpc", "model": str(place / "head"), "num_speculative_tokens_per_batch_size": [[1, 4, 3]]}
    made = engine_config(place / "target", given)
    assert not made.use_v2_model_runner
    assert made.speculative_config.num_speculative_tokens_per_batch_size[0] == (1, 4, 3)


def test_an_error_ends_vllms_own_command_in_one_line(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def theirs(*error: Any) -> None:
        print("a traceback", file=sys.stderr)

    monkeypatch.setattr(sys, "excepthook", theirs)
    refusal(place, model=str(place / "nowhere"))
    assert sys.excepthook is theirs, "a script keeps its tracebacks"
    monkeypatch.setattr(sys, "argv", ["/usr/bin/vllm", "serve"])
    message = refusal(place, model=str(place / "nowhere"))
    capsys.readouterr()
    sys.excepthook(MtpcError, MtpcError(message), None)
    assert capsys.readouterr().err == f"vllm: error: {message}\n"
    sys.excepthook(KeyError, KeyError("x"), None)
    assert capsys.readouterr().err == "a traceback\n"


@pytest.mark.feature("pipeline parallel", "refused", "mtpc on V1")
def test_pipeline_parallel_on_v1_is_refused(place: Path) -> None:
    given = {"method": "mtpc", "model": str(place / "head")}
    with pytest.raises(MtpcError, match="pipeline_parallel_size=2") as caught:
        engine_config(place / "target", given, pipeline_parallel_size=2, distributed_executor_backend="mp")
    assert "\n" not in str(caught.value)
