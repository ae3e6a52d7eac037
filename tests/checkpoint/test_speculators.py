"""config.json as `speculators` reads it: with the package itself where it is installed, else with its schema."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import ValidationError

from tests.support import speculators_schema
from vllm_mtpc import demo
from vllm_mtpc.checkpoint import read_config
from vllm_mtpc.config.base import SPECULATORS_VERSION
from vllm_mtpc.config.mtpc import HeadConfig
from vllm_mtpc.config.ptp import PtpConfig
from vllm_mtpc.errors import MtpcError

TARGET = {
    "model_type": "llama",
    "hidden_size": 8,
    "vocab_size": 5,
    "num_hidden_layers": 2,
    "num_attention_heads": [2, 4],  # of a model whose layers differ: no size to be written down
    "architectures": ["LlamaForCausalLM"],
}
HEADS = {
    "mtpc": lambda: HeadConfig.create(circuit="cp", window=4, num_components=2, target=TARGET, verifier="org/model"),
    "ptp": lambda: PtpConfig.create(variant="o-ptp", window=4, target=TARGET, verifier="org/model"),
}


def validate(values: dict[str, Any]) -> Any:
    """What speculators makes of a config.json; raises its ValidationError."""
    if find_spec("speculators") is None:
        return speculators_schema.SpeculatorModelConfig.model_validate(values)
    from speculators import SpeculatorModelConfig

    kind = values["speculators_model_type"]
    if kind not in SpeculatorModelConfig.registry:  # a method is registered by whoever brings it

        class Ours(SpeculatorModelConfig):
            speculators_model_type: Literal[kind] = kind

        SpeculatorModelConfig.register(kind)(Ours)
        SpeculatorModelConfig.reload_schema()
    return SpeculatorModelConfig.from_dict(values)


@pytest.mark.parametrize("kind", HEADS)
def test_a_heads_config_is_read(kind: str) -> None:
    values = json.loads(HEADS[kind]().to_json())
    found = validate(values)
    assert (found.speculators_model_type, found.speculators_version) == (kind, SPECULATORS_VERSION)
    assert found.speculators_config.algorithm == kind
    assert found.speculators_config.proposal_methods[0].speculative_tokens == 3
    assert found.speculators_config.verifier.name_or_path == "org/model"
    assert found.window == 4  # ours next to
    assert values["transformer_layer_config"].keys() == {"model_type", "hidden_size", "vocab_size", "num_hidden_layers"}


@pytest.mark.parametrize("name", [*demo.CIRCUITS, demo.BACKBONE, *demo.PTP])
def test_the_packaged_heads_are_read(name: str) -> None:
    values = json.loads((demo.path(name) / "config.json").read_text())
    assert validate(values).speculators_config.proposal_methods[0].speculative_tokens == 7
    assert values["speculators_version"] == SPECULATORS_VERSION


def old(values: dict[str, Any], default: str) -> dict[str, Any]:
    """A config as format 1 had it."""
    theirs = values["speculators_config"]
    methods = [{**method, "proposal_type": default} for method in theirs["proposal_methods"]]
    left = {key: values[key] for key in values if key not in ("speculators_version", "draft_sample_method")}
    theirs = {**theirs, "default_proposal_method": default, "proposal_methods": methods}
    return {**left, "format_version": 1, "speculators_config": theirs}


def test_speculators_refuses_format_1() -> None:
    """The control: what was written before."""
    with pytest.raises(ValidationError, match="proposal_type"):
        validate(old(json.loads(HEADS["mtpc"]().to_json()), "probabilistic"))


@pytest.mark.parametrize("kind, default", [("mtpc", "probabilistic"), ("mtpc", "greedy"), ("ptp", "greedy")])
def test_heads_of_format_1_are_read_as_they_were_meant(tmp_path: Path, kind: str, default: str) -> None:
    config = HEADS[kind]()
    (tmp_path / "config.json").write_text(json.dumps(old(json.loads(config.to_json()), default)))
    found = read_config(tmp_path)
    if kind == "mtpc":
        assert found.draft_sample_method == default
        found = found.model_copy(update={"draft_sample_method": "probabilistic"})
    assert found == config


@pytest.mark.parametrize("changes", [{"speculators_config": []}, {"speculators_config": {"proposal_methods": 3}}])
def test_a_damaged_config_of_format_1_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    values = old(json.loads(HEADS["mtpc"]().to_json()), "probabilistic")
    (tmp_path / "config.json").write_text(json.dumps({**values, **changes}))
    with pytest.raises(MtpcError, match=r"config\.json"):
        read_config(tmp_path)
