"""MTP layers of a target, found without starting an engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.peers import change, make_mimo
from vllm_mtpc import demo
from vllm_mtpc.engine.target_config import count_mtp_layers
from vllm_mtpc.errors import UsageError


def test_mtp_layers_are_counted_from_the_config(tmp_path: Path) -> None:
    make_mimo(tmp_path)
    for model, layers in ((tmp_path, 1), (demo.path("target"), 0)):
        assert count_mtp_layers({"model": str(model), "dtype": "float32"}) == layers
    change(tmp_path, num_nextn_predict_layers=0)
    assert count_mtp_layers({"model": str(tmp_path), "dtype": "float32", "skip_tokenizer_init": True}) == 0


def test_unreadable_target_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="target /no/such/target: vLLM cannot read it"):
        count_mtp_layers({"model": "/no/such/target"})
