"""Bad checkpoints: each refused whole, in one line that names what was given and what is allowed."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_mtpc.checkpoint import check_tensors, load_head, read_config
from vllm_mtpc.errors import CheckpointError, MtpcError

WEIGHTS = "model.safetensors"


def refusal(folder) -> str:
    """The one line of load_head; check_tensors must say the same wherever the config is good."""
    with pytest.raises(MtpcError) as caught:
        load_head(folder)
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    assert str(folder) in text
    try:
        config = read_config(folder)
    except MtpcError:
        return text
    with pytest.raises(CheckpointError) as again:
        check_tensors(folder, config)
    assert str(again.value) == text
    return text


def rewrite(folder, change) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def edit(folder, key: str, value) -> None:
    values = json.loads((folder / "config.json").read_text())
    values[key] = value
    (folder / "config.json").write_text(json.dumps(values))


def write_raw(folder, header: dict, size: int) -> None:
    """A safetensors file by hand: any header over zero bytes."""
    text = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + bytes(size))


def test_a_good_head_is_accepted(folder):
    check_tensors(folder, read_config(folder))
    load_head(folder)


@pytest.mark.parametrize("name", ["leaf_weight", "root_weight", "inner_weight", "inner_bias"])
def test_a_missing_tensor_is_named(folder, name):
    rewrite(folder, lambda tensors: tensors.pop(name))
    assert f"missing: {name}" in refusal(folder)


def test_an_extra_tensor_is_named_with_the_allowed_ones(folder):
    rewrite(folder, lambda tensors: tensors.update({"extra\nbias": torch.zeros(2)}))
    text = refusal(folder)
    assert "extra bias" in text
    assert "inner_bias, inner_weight, leaf_weight, root_weight" in text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["leaf_weight", "inner_bias"])
def test_a_tensor_that_is_not_finite_is_named(folder, name, value):
    def damage(tensors):
        tensors[name].view(-1)[-1] = value

    rewrite(folder, damage)
    text = refusal(folder)
    assert repr(name) in text
    assert "NaN or infinity" in text


def test_a_wrong_shape_is_named_with_the_right_one(folder):
    rewrite(folder, lambda tensors: tensors.update(root_weight=torch.zeros(2, 5)))
    text = refusal(folder)
    assert "'root_weight'" in text
    assert "(2, 5)" in text
    assert "(2, 4)" in text


@pytest.mark.parametrize("shape", [(8,), (4, 2), (1, 2, 4)])
def test_a_wrong_shape_of_the_right_size_is_refused_too(folder, shape):
    rewrite(folder, lambda tensors: tensors.update(root_weight=torch.zeros(shape)))
    assert str(shape) in refusal(folder)


@pytest.mark.parametrize("key, value", [("vocab_size", 8), ("hidden_size", 3), ("window", 3), ("num_components", 3)])
def test_a_config_of_another_size_is_refused(folder, key, value):
    if key == "window":  # fewer drafts as well, or the config alone would be refused
        values = json.loads((folder / "config.json").read_text())["speculators_config"]
        values["proposal_methods"][0]["speculative_tokens"] = 2
        edit(folder, "speculators_config", values)
    edit(folder, key, value)
    text = refusal(folder)
    assert "shape" in text or "unknown tensor" in text or "missing" in text
    assert WEIGHTS in text


def test_the_largest_sizes_a_config_may_name_are_refused_by_shape_and_not_allocated(folder):
    for key, value in {"window": 256, "num_components": 4096, "vocab_size": 2**22, "hidden_size": 2**17}.items():
        edit(folder, key, value)
    assert "4194304" in refusal(folder)


@pytest.mark.parametrize("circuit", ["cp", "hmm"])
def test_weights_of_another_circuit_are_refused(folder, circuit):
    edit(folder, "circuit", circuit)
    text = refusal(folder)
    assert "unknown tensor" in text or "shape" in text


@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.int8, torch.int64, torch.bool, torch.float64, torch.uint8, torch.float8_e4m3fn]
)
def test_a_wrong_dtype_is_named_with_the_allowed_ones(folder, dtype):
    rewrite(folder, lambda tensors: tensors.update(root_weight=torch.zeros(2, 4).to(dtype)))
    text = refusal(folder)
    assert str(dtype) in text
    assert "float16, bfloat16, float32" in text


@pytest.mark.parametrize(
    "dtype, bits",
    [("F4", 4), ("F6_E2M3", 6), ("F6_E3M2", 6), ("F8_E8M0", 8), ("F8_E5M2", 8), ("U16", 16), ("U64", 64), ("C64", 64)],
)
def test_a_dtype_that_only_the_format_knows_is_refused(folder, dtype, bits):
    entry, start = {}, 0
    for name, tensor in load_file(folder / WEIGHTS).items():
        size = tensor.numel() * bits // 8
        entry[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, start + size]}
        start += size
    write_raw(folder, entry, start)
    refusal(folder)


def test_a_wrong_format_version_is_refused(folder):
    edit(folder, "format_version", 7)
    text = refusal(folder)
    assert "7" in text
    assert "formats 1 and 2" in text


@pytest.mark.parametrize("name", ["model@900.pt", "pytorch_model.bin", "head.pth", "last.ckpt"])
def test_pickled_weights_are_named_and_never_loaded(folder, name):
    (folder / WEIGHTS).rename(folder / name)
    text = refusal(folder)
    assert name in text
    assert "never loaded" in text
    assert WEIGHTS in text


def test_a_missing_weight_file_is_refused(folder):
    (folder / WEIGHTS).unlink()
    assert f"has no {WEIGHTS}" in refusal(folder)


def test_a_folder_in_place_of_the_weight_file_is_refused(folder):
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()
    assert WEIGHTS in refusal(folder)


def test_a_truncated_weight_file_is_refused_at_any_length(folder):
    data = (folder / WEIGHTS).read_bytes()
    header = struct.unpack("<Q", data[:8])[0]
    for length in (0, 1, 7, 8, 9, 8 + header // 2, 8 + header, len(data) // 2, len(data) - 1):
        (folder / WEIGHTS).write_bytes(data[:length])
        assert "not a readable safetensors file" in refusal(folder)


def test_bytes_after_the_tensors_are_refused(folder):
    with open(folder / WEIGHTS, "ab") as file:
        file.write(b"\0")
    assert "not a readable safetensors file" in refusal(folder)


def test_a_pickle_under_the_name_of_safetensors_is_refused(folder):
    torch.save({"leaf_weight": torch.zeros(2)}, folder / WEIGHTS)
    assert "not a readable safetensors file" in refusal(folder)


def test_a_folder_without_config_is_refused(folder):
    (folder / "config.json").unlink()
    assert "has no config.json" in refusal(folder)


@pytest.mark.parametrize("name", ["nowhere", "model.safetensors"])
def test_a_path_that_is_no_folder_is_refused(folder, name):
    assert "has no config.json" in refusal(folder / name)


def test_the_folder_of_a_target_is_refused_as_a_head(folder):
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    assert "not a head's config" in refusal(folder)


@pytest.mark.parametrize("content", ["[]", "null", '"mtpc"', "{", ""])
def test_a_config_that_is_not_an_object_is_refused(folder, content):
    (folder / "config.json").write_text(content)
    assert "config.json" in refusal(folder)


def test_nothing_is_half_loaded(folder, monkeypatch):
    """A head whose last tensor is bad is not built from the good ones."""
    rewrite(folder, lambda tensors: tensors["root_weight"].fill_(float("nan")))
    monkeypatch.setattr("vllm_mtpc.heads.linear.LinearHead.load_state_dict", lambda *_, **__: pytest.fail("loaded"))
    refusal(folder)
