"""Options of an engine with a head: their defaults, and what follows from them in vLLM's configuration."""

from __future__ import annotations

import ast
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import Qwen3NextConfig

from tests.proposers.conftest import configured, rewrite, set_runner
from tests.support.configs import engine_config
from vllm_mtpc.errors import MtpcError
from vllm_mtpc.proposers.options import ptp_options
from vllm_mtpc.proposers.options.ptp_options import choose_attention
from vllm_mtpc.proposers.options.refusals import BEFORE_NORM
from vllm_mtpc.proposers.options.versions import vllm_minor


def served(*given: Any, **options: Any) -> Any:
    return configured(*given, **options).speculative_config


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
    with pytest.raises(MtpcError) as caught:
        configured(place, head)
    message = str(caught.value)
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
    rewrite(
        place / "target" / "config.json",
        **{"model_type": "qwen2", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1},
    )  # without a late network rows go through the target's own norm
    assert served(place, "o-ptp").head.late_width is None


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
    assert made.speculative_config.head.circuit.kind == "btree" and made.speculative_config.num_speculative_tokens == 4
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
    with pytest.raises(MtpcError):
        configured(place, "nowhere")
    assert sys.excepthook is original, "a script keeps its tracebacks"
    monkeypatch.setattr(sys, "argv", ["/usr/bin/vllm", "serve"])
    with pytest.raises(MtpcError) as caught:
        configured(place, "nowhere")
    message = str(caught.value)
    capsys.readouterr()
    sys.excepthook(MtpcError, MtpcError(message), None)
    assert capsys.readouterr().err == f"vllm: error: {message}\n"
    sys.excepthook(KeyError, KeyError("x"), None)
    assert capsys.readouterr().err == "a traceback\n"
