"""config.json follows the schema of `speculators`, and format 1, which did not, is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_mtpc import demo
from vllm_mtpc.checkpoint import read_config
from vllm_mtpc.config.base import SPECULATORS_VERSION
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.config.ptp_config import PtpConfig

TARGET = {
    "model_type": "llama",
    "hidden_size": 8,
    "vocab_size": 5,
    "num_hidden_layers": 2,
    "num_attention_heads": [2, 4],  # not a single size: left out
    "architectures": ["LlamaForCausalLM"],
}
HEADS = {
    "mtpc": lambda: HeadConfig.create(circuit="cp", window=4, num_components=2, target=TARGET, verifier="org/model"),
    "ptp": lambda: PtpConfig.create(variant="o-ptp", window=4, target=TARGET, verifier="org/model"),
}


# The schema of speculators 0.9.0, copied from its published fields. The package is not a requirement of the tests: it
# pins older datasets and transformers.


class ProposalSchema(BaseModel):
    proposal_type: Literal["greedy"] = "greedy"
    speculative_tokens: int = Field(default=5, ge=1)
    verifier_accept_k: int = Field(default=1, ge=1)
    accept_tolerance: float = Field(default=0.0, ge=0.0)


class VerifierSchema(BaseModel):
    name_or_path: str | None
    architectures: list[str]


class SpeculatorsSchema(BaseModel):
    algorithm: str
    proposal_methods: list[ProposalSchema]
    default_proposal_method: Literal["greedy"]  # of one of proposal_methods
    verifier: VerifierSchema


class ModelSchema(BaseModel):
    model_config = ConfigDict(extra="allow")

    speculators_model_type: str = ""
    speculators_version: str = ""
    speculators_config: SpeculatorsSchema


validate = ModelSchema.model_validate


@pytest.mark.parametrize("kind", HEADS)
def test_config_is_valid(kind: str) -> None:
    values = json.loads(HEADS[kind]().to_json())
    found = validate(values)
    assert (found.speculators_model_type, found.speculators_version) == (kind, SPECULATORS_VERSION)
    assert found.speculators_config.algorithm == kind
    assert found.speculators_config.proposal_methods[0].speculative_tokens == 3
    assert found.speculators_config.verifier.name_or_path == "org/model"
    assert found.window == 4  # an additional field
    assert values["transformer_layer_config"].keys() == {"model_type", "hidden_size", "vocab_size", "num_hidden_layers"}


@pytest.mark.parametrize("name", [*demo.CIRCUITS, demo.BACKBONE, *demo.PTP])
def test_packaged_config_is_valid(name: str) -> None:
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
    """The control."""
    with pytest.raises(ValidationError, match="proposal_type"):
        validate(old(json.loads(HEADS["mtpc"]().to_json()), "probabilistic"))


@pytest.mark.parametrize("kind, default", [("mtpc", "probabilistic"), ("mtpc", "greedy"), ("ptp", "greedy")])
def test_format_1_is_upgraded(tmp_path: Path, kind: str, default: str) -> None:
    config = HEADS[kind]()
    (tmp_path / "config.json").write_text(json.dumps(old(json.loads(config.to_json()), default)))
    found = read_config(tmp_path)
    if kind == "mtpc":
        assert found.draft_sample_method == default
        found = found.model_copy(update={"draft_sample_method": "probabilistic"})
    assert found == config
