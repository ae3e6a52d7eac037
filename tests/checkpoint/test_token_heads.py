"""`vllm-mtpc convert` of a target itself writes its own prediction heads as a head folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint.conftest import convert
from tests.support.evabyte_reference import SIZES, Reference, make_evabyte
from tests.support.files import front_matter_of
from vllm_mtpc.checkpoint import load_head


@pytest.mark.parametrize("is_sharded", [False, True])
def test_conditionals_equal_the_targets_heads(tmp_path: Path, is_sharded: bool) -> None:
    reference = Reference(make_evabyte(tmp_path / "target", num_hidden_layers=1), num_hidden_layers=1)
    if is_sharded:
        weights = load_file(tmp_path / "target" / "model.safetensors")
        save_file({"lm_head.weight": weights["lm_head.weight"]}, tmp_path / "target" / "b.safetensors")
        (tmp_path / "target" / "model.safetensors").unlink()
        index = {"weight_map": dict.fromkeys(weights, "a.safetensors") | {"lm_head.weight": "b.safetensors"}}
        (tmp_path / "target" / "model.safetensors.index.json").write_text(json.dumps(index))
    convert(tmp_path / "target", tmp_path / "target")
    config, head = load_head(tmp_path / "head", torch.float32)
    assert {"library_name", "pipeline_tag", "tags"} <= front_matter_of(tmp_path / "head").keys()
    assert (config.circuit.kind, config.window, config.num_components) == ("ff", SIZES["num_pred_heads"], 1)
    assert config.num_speculative_tokens == 7
    assert (tmp_path / "head" / config.speculators_config.verifier.name_or_path).resolve() == tmp_path / "target"
    text = [1, 70, 90, 200, 319]
    hidden = reference.hidden(text)
    leaf = head(hidden).leaf[:, :, 0]  # [B, n, V]
    for position in range(config.window):
        # the same product of the same numbers, once for all heads and once for one
        torch.testing.assert_close(
            leaf[:, position], reference.logits(text, position).log_softmax(-1), rtol=1e-4, atol=1e-4
        )
