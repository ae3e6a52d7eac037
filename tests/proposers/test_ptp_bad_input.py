"""What method ptp is not served with: refused in one line, at start, in the caller's process."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.support.configs import engine_config
from tests.support.models import make_ptp_head, make_target
from vllm_mtpc.errors import MtpcError
from vllm_mtpc.proposers.config import ptp as config_ptp
from vllm_mtpc.proposers.config import refusals
from vllm_mtpc.proposers.config.refusals import how_to_v2


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ptp_bad_input")
    target = make_target(folder / "target", vocab_size=32, seed=0)
    make_ptp_head(folder / "head", target, "o-ptp", window=5)
    return folder


@pytest.fixture
def place(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy that a test may damage, on Model Runner V2 unless the test says otherwise."""
    import vllm.config.vllm

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setattr(vllm.config.vllm, "HAS_TRITON", True)  # asked for when a config is made; nothing runs here
    return Path(shutil.copytree(made, tmp_path / "copy"))


def refusal(place: Path, arguments: dict[str, Any] | None = None, **given: Any) -> str:
    speculative_config = {"method": "ptp", "model": str(place / "head"), **given}
    with pytest.raises(MtpcError) as caught:
        engine_config(place / "target", speculative_config, **(arguments or {}))
    message = str(caught.value)
    assert "\n" not in message, message
    return message


def rewrite(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_good_head_is_accepted_with_its_defaults(place: Path) -> None:
    config = engine_config(place / "target", {"method": "ptp", "model": str(place / "head")})
    spec = config.speculative_config
    assert spec.num_speculative_tokens == 4 and spec.draft_pass == "two-pass" and spec.group_sizes == "static"
    assert "variant='o-ptp'" in repr(spec)
    assert config.cache_config.block_size == 32  # of a CPU: groups own blocks, so small ones
    assert engine_config(place / "head", None).speculative_config.method == "ptp"


def test_v1_is_refused_by_name(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    message = refusal(place)
    assert "Model Runner V1" in message and "allowed: Model Runner V2" in message and "MtPC" in message
    assert "type scripts/v2_on_cpu.sh vllm serve" in message and "drop" not in message


def test_what_to_type_for_v2_is_what_helps_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable is to be dropped only where it is set, and not on a CPU, where that would not do."""
    for is_cpu, variable, said in (
        (True, None, "scripts/v2_on_cpu.sh vllm serve"),
        (True, "0", "scripts/v2_on_cpu.sh vllm serve"),
        (False, "0", "drop VLLM_USE_V2_MODEL_RUNNER=0"),
        (False, None, "vLLM's log says"),
    ):
        monkeypatch.setattr(refusals, "current_platform", SimpleNamespace(is_cpu=lambda is_cpu=is_cpu: is_cpu))
        monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
        if variable:
            monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", variable)
        assert said in how_to_v2() and ("drop" in how_to_v2()) == (not is_cpu and variable == "0")


@pytest.mark.feature("pipeline parallel", "refused", "ptp on V2")
def test_pipeline_parallel_is_refused(place: Path) -> None:
    message = refusal(place, {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"})
    assert "pipeline_parallel_size=2" in message and "tensor_parallel_size" in message


@pytest.mark.feature("LoRA requests on the target", "refused", "ptp on V2")
def test_lora_requests_are_refused(place: Path) -> None:
    assert "enable_lora" in refusal(place, {"enable_lora": True})


def test_a_target_with_a_sliding_window_is_refused(place: Path) -> None:
    rewrite(
        place / "target" / "config.json", architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=16
    )
    assert "full attention" in (message := refusal(place)) and "MtPC" in message


def test_a_head_of_the_other_method(place: Path) -> None:
    assert "is of method 'ptp', not 'mtpc'" in refusal(place, method="mtpc")


@pytest.mark.parametrize("drafts", [0, 5, "2"])
def test_more_drafts_than_the_window(place: Path, drafts: Any) -> None:
    assert f"num_speculative_tokens={drafts}" in (message := refusal(place, num_speculative_tokens=drafts))
    assert "1 to 4" in message


@pytest.mark.parametrize(
    ("key", "value"),
    [("draft_pass", "three"), ("group_sizes", "x"), ("max_aux_rows", 1), ("aux_rows_per_request", 0)],
)
def test_unknown_value_of_an_option(place: Path, key: str, value: Any) -> None:
    assert key in refusal(place, **{key: value})


@pytest.mark.parametrize("key", ["draft_sample_method", "rejection_sample_method", "typo", "head"])
def test_an_option_of_other_methods_is_refused(place: Path, key: str) -> None:
    message = refusal(place, **{key: "x"})
    assert repr(key) in message and "draft_pass" in message


def test_a_damaged_head_is_refused_whole(place: Path) -> None:
    file = place / "head" / "adapter_model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    next(iter(tensors.values()))[0] = float("nan")
    save_file(tensors, file)
    assert "adapter_model.safetensors" in refusal(place)


def test_too_small_a_cache_is_refused(place: Path) -> None:
    from types import SimpleNamespace

    config = engine_config(place / "target", {"method": "ptp", "model": str(place / "head")}, max_num_seqs=8)
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=32))
    enough = SimpleNamespace(num_blocks=10_000, kv_cache_groups=[group])
    reserved = config.speculative_config.reserved_blocks(config, enough)
    assert reserved > 0
    few = SimpleNamespace(num_blocks=reserved + 2, kv_cache_groups=[group])  # a request of 64 tokens needs 3
    with pytest.raises(MtpcError, match="max_aux_rows") as caught:
        config.speculative_config.reserved_blocks(config, few)
    assert "\n" not in str(caught.value)


def test_data_parallel_experts_are_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config.model import ModelConfig

    monkeypatch.setattr(ModelConfig, "is_moe", property(lambda self: True))
    message = refusal(place, {"data_parallel_size": 2})
    assert "data_parallel_size on a mixture of experts" in message


def test_a_fitted_length_is_refused(place: Path) -> None:
    assert "max_model_len 'auto'" in refusal(place, {"max_model_len": -1})


@pytest.mark.parametrize("draft_pass", ["merged", "two-pass"])
def test_flash_attn_is_chosen_where_vllm_takes_flashinfer(draft_pass: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that the user named is kept, or refused for the merged pass."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from vllm_mtpc.proposers.config.ptp import choose_attention

    sorting = SimpleNamespace(backend=AttentionBackendEnum.FLASHINFER)
    is_refused = draft_pass == "merged"
    refused = pytest.raises(MtpcError, match=r"FLASHINFER .* type --attention-backend FLASH_ATTN")
    with refused if is_refused else nullcontext():
        choose_attention(sorting, draft_pass)
    assert sorting.backend is AttentionBackendEnum.FLASHINFER
    chosen = SimpleNamespace(backend=None)
    choose_attention(chosen, draft_pass)
    assert chosen.backend is None  # a CPU
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    for capability, backend in ((90, None), (100, AttentionBackendEnum.FLASH_ATTN)):
        monkeypatch.setattr(
            type(current_platform), "is_device_capability_family", lambda self, asked, own=capability: asked == own
        )
        choose_attention(chosen, draft_pass)
        assert chosen.backend is backend
    named = SimpleNamespace(backend=AttentionBackendEnum.TRITON_ATTN)
    choose_attention(named, draft_pass)
    assert named.backend is AttentionBackendEnum.TRITON_ATTN


def test_two_passes_choose_attention_when_the_engine_is_configured(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(config_ptp, "choose_attention", lambda config, draft_pass: asked.append(draft_pass))
    engine_config(place / "target", {"method": "ptp", "model": str(place / "head")})
    assert asked == ["two-pass"]


@pytest.mark.parametrize(("backend", "mode", "lines"), [
    ("FLASHINFER", "FULL_AND_PIECEWISE", 1), ("FLASHINFER", "NONE", 0), ("FLASH_ATTN", "FULL_AND_PIECEWISE", 0)
])  # fmt: skip
def test_drafts_without_graphs_are_warned_of_in_one_line(
    backend: str, mode: str, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config.compilation import CUDAGraphMode

    from vllm_mtpc.proposers.v2.ptp import ptp_speculator as module

    said: list[str] = []
    monkeypatch.setattr(module.logger, "warning", lambda text, *values: said.append(text % values))
    modes: list[Any] = []
    monkeypatch.setattr(module, "DraftGraphs", lambda config, device, mode, *more: modes.append(mode))
    group = SimpleNamespace(
        backend=SimpleNamespace(get_name=lambda: backend), get_metadata_builder=lambda index: SimpleNamespace()
    )
    plan = SimpleNamespace(bucket=lambda batch: None)
    made = SimpleNamespace(aux_groups=[[group]], plan=plan, max_num_reqs=2, vllm_config=None, device=None)
    module.PtpSpeculator.init_cudagraph_manager(made, CUDAGraphMode[mode])
    assert len(said) == lines and (not said or ("FLASHINFER" in said[0] and "--attention-backend" in said[0]))
    assert modes == [CUDAGraphMode[mode if backend == "FLASH_ATTN" else "NONE"]]


def test_a_late_network_on_a_target_whose_states_come_before_its_norm(place: Path) -> None:
    """Rows go through the target's own logits, which norms them; a late network would read them as they are."""
    states = refusals.of_states(SimpleNamespace(model="head", target_model_config=SimpleNamespace(
        model="target", architecture="MiMoForCausalLM")))  # fmt: skip
    assert all(states.values())
    rewrite(place / "target" / "config.json", model_type="qwen2", architectures=["MiMoForCausalLM"])
    given = {"method": "ptp", "model": str(place / "head")}
    assert engine_config(place / "target", given).speculative_config.head.late_width is None
    make_ptp_head(place / "head", make_target(place / "other", vocab_size=32, seed=0), "late", window=5)
    assert "from before its final norm" in refusal(place)
