"""HeadConfig and PtpConfig follow the schema of `speculators`, are read back, and any other is refused in one line."""

from __future__ import annotations

import copy
import json
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from vllm_mtpc.checkpoint import read_config
from vllm_mtpc.config.base import SPECULATORS_VERSION, AnyHeadConfig
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.config.ptp_config import PtpConfig
from vllm_mtpc.errors import HeadConfigError
from vllm_mtpc.heads import head_options
from vllm_mtpc.heads.ptp.embedding import EMBEDDINGS

TARGET: dict[str, Any] = {"model_type": "llama", "hidden_size": 8, "vocab_size": 5, "num_hidden_layers": 2}
TARGET |= {"architectures": ["LlamaForCausalLM"], "num_attention_heads": [2, 4]}
NAN, INF = float("nan"), float("inf")
PTP_OPTIONS = {"u_features", "u_hidden", "late_width", "distribution_trust", "accepted"}
KINDS = ("mtpc", "ptp")


def create(kind: str = "mtpc", **changes: Any) -> AnyHeadConfig:
    """A config of window 5."""
    settings = {"window": 5, "target": TARGET, "verifier": "../target"}
    if kind == "ptp":
        return PtpConfig.create(**(settings | {"variant": "o-ptp"} | changes))
    return HeadConfig.create(**(settings | {"circuit": "btree", "num_components": 2} | changes))


def edited(kind: str, path: str, value: Any = ...) -> dict[str, Any]:
    """A valid config with the value at `path` ("a.b.0.c") set, or removed."""
    values = copy.deepcopy(create(kind).model_dump(exclude_none=True))
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    place: Any = values
    for part in parents:
        place = place[part]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return values


def refusal(kind: str, values: Any) -> str:
    with pytest.raises(HeadConfigError) as caught:
        type(create(kind)).parse(values, "HEAD/config.json")
    text = str(caught.value)
    assert len(text.splitlines()) == 1 and text.startswith("HEAD/config.json: ")
    return text


PTP_CONFIGS = [
    ("ptp", {"variant": variant, "u_embedding": name, "lora_rank": 3, "lora_alpha": 6, "accepted": (0.5, 0.5, 0, 0, 0)})
    for name in EMBEDDINGS
    for variant in ("o-ptp", "c-ptp", "late", "independent")
]


@pytest.mark.parametrize("kind, settings", [("mtpc", {}), *PTP_CONFIGS])
def test_created_config_is_read_back_equal(tmp_path, kind, settings):
    config = create(kind, trained_temperature=0.7, trained_top_k=40, trained_top_p=0.9, **settings)
    (tmp_path / "config.json").write_text(config.to_json())
    assert read_config(tmp_path) == config


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
    speculators_model_type: str = ""
    speculators_version: str = ""
    speculators_config: SpeculatorsSchema


@pytest.mark.parametrize("kind", KINDS)
def test_config_follows_the_schema_of_speculators(kind):
    values = json.loads(create(kind, num_speculative_tokens=3).to_json())
    assert ModelSchema.model_validate(values).speculators_version == SPECULATORS_VERSION
    assert values["speculators_model_type"] == values["speculators_config"]["algorithm"] == kind
    assert values["architectures"] == [{"mtpc": "MtpcHeadModel", "ptp": "PtpHeadModel"}[kind]]
    assert "model_type" not in values
    section = values["speculators_config"]
    assert section["default_proposal_method"] == "greedy"
    assert section["proposal_methods"] == [{"proposal_type": "greedy", "speculative_tokens": 3}]
    assert section["verifier"] == {"name_or_path": "../target", "architectures": ["LlamaForCausalLM"]}
    kept = TARGET.keys() - {"architectures", "num_attention_heads"}  # not a single size: left out
    assert values["transformer_layer_config"] == {key: TARGET[key] for key in kept}
    assert create(kind).num_speculative_tokens == 4  # the window without x_1
    assert all(field.description for field in type(create(kind)).model_fields.values())


@pytest.mark.parametrize("head, options", [("linear", {}), ("shared", {"expander_rank": 64})])
def test_options_of_other_heads_are_not_written(head, options):
    values = json.loads(create(head=head).to_json())
    assert {key: values[key] for key in values if key in head_options()} == options
    assert HeadConfig.parse(values) == create(head=head)
    named = {key: value * 2 for key, value in options.items()}
    assert {key: getattr(create(head=head, **named), key) for key in options} == named


def test_defaults_depend_on_the_target_and_the_variant():
    assert not PTP_OPTIONS & json.loads(create("ptp").to_json()).keys()
    late = create("ptp", variant="late", u_embedding="arithmetic-mlp", accepted=[1, 0, 0, 0, 0])
    assert (late.late_width, late.distribution_trust) == (8, 0.85)
    assert PTP_OPTIONS & json.loads(late.to_json()).keys() == PTP_OPTIONS


METHODS, VERIFIER = "speculators_config.proposal_methods", "speculators_config.verifier.name_or_path"
LAYER = "transformer_layer_config"
COMMON: list[tuple[str, Any, list[str]]] = [
    ("window", 1, ["window", "1", "2"]),
    ("window", 10**9, ["window", "1000000000", "256"]),
    ("window", True, ["window", "True", "integer"]),
    ("vocab_size", 10**18, ["vocab_size", str(10**18), "4194304"]),
    ("hidden_size", 10**18, ["hidden_size", str(10**18), "131072"]),
    ("format_version", 3, ["format_version", "3", "allowed: 2"]),
    ("speculators_model_type", "eagle3", ["speculators_model_type", "'eagle3'"]),
    ("architectures", "MtpcHeadModel", ["architectures", "'MtpcHeadModel'", "list"]),
    ("trained_temperature", 0, ["trained_temperature", "0", "greater than 0"]),
    ("trained_temperature", INF, ["trained_temperature", "inf", "finite"]),
    ("trained_top_p", 1.5, ["trained_top_p", "1.5", "1"]),
    ("speculators_config.algorithm", "eagle3", ["algorithm", "'eagle3'", "'mtpc' or 'ptp'"]),
    (METHODS, [], [METHODS, "[]", "1"]),
    (f"{METHODS}.0.proposal_type", "tree", ["'tree'", "'greedy'"]),
    (f"{METHODS}.0.speculative_tokens", 5, ["speculative_tokens=5", "window=5", "4"]),
    (VERIFIER, "a\0b", ["name_or_path", "should match pattern"]),
    (VERIFIER, "a" * 5000, ["name_or_path", "1024"]),
    (f"{LAYER}.num_hidden_layers", "eight", ["num_hidden_layers = 'eight'", "4096"]),
    (f"{LAYER}.num_hidden_layers", 10**9, ["num_hidden_layers = 1000000000", "4096"]),
    (f"{LAYER}.model_type", ["llama"], ["model_type = ['llama']", "a name"]),
    (f"{LAYER}.auto_map", {}, ["unknown 'auto_map'", "num_hidden_layers"]),
]
WRONG: dict[str, list[tuple[str, Any, list[str]]]] = {
    "mtpc": [
        ("circuit", "spn", ["'spn'", "ff, cp, hmm, btree"]),
        ("circuit", "ff", ["num_components=2"]),
        ("head", "mlp", ["'mlp'", "linear, shared, backbone"]),
        ("head", "shared", ["'shared'", "needs expander_rank", "expander_rank=64"]),
        ("expander_rank", 4, ["expander_rank=4", "'linear'", "remove expander_rank"]),
        ("component_rank", -1, ["component_rank", "greater than or equal to 0"]),
        ("expander_rank", 10**9, ["expander_rank", "1000000000", "131072"]),
        ("num_components", 10**9, ["num_components", "1000000000", "128"]),
        ("lora_layers", 3, ["lora_layers", "3", "0, 1, 2 or 4"]),
    ],
    "ptp": [
        ("variant", "mtp", ["variant", "'mtp'", "'o-ptp', 'c-ptp', 'late' or 'independent'"]),
        ("variant", "late", ["late_width=None", "variant late has it", "set it"]),
        ("u_embedding", "fourier", ["'fourier'", "ieee, scalar"]),
        ("late_width", 3, ["late_width=3 with variant 'o-ptp'", "remove it"]),
        ("distribution_trust", 0.5, ["distribution_trust=0.5 with variant 'o-ptp'", "remove it"]),
        ("distribution_trust", 1.0, ["distribution_trust", "1.0", "less than 1"]),
        ("lora_alpha", 0, ["lora_alpha", "0", "greater than 0"]),
        ("speculators_model_type", "mtpc", ["speculators_model_type", "'mtpc'", "'ptp'"]),
        ("accepted", [0.5, 0.5], ["accepted has 2 entries", "window=5"]),
        ("accepted", [0.5, 0.2, 0.1, 0.1, 0], ["accepted", "sum is 0.9"]),
        ("accepted", [1.5, -0.5, 0, 0, 0], ["accepted.1", "greater than or equal to 0"]),
        (LAYER, {}, ["num_hidden_layers is missing"]),
    ],
}


@pytest.mark.parametrize("kind, path, value, words", [(kind, *case) for kind in KINDS for case in COMMON + WRONG[kind]])
def test_wrong_value_is_refused_with_the_allowed_ones(kind, path, value, words):
    text = refusal(kind, edited(kind, path, value))
    assert all(word in text for word in words), text


@pytest.mark.parametrize("kind, own", [("mtpc", "circuit"), ("ptp", "variant")])
def test_unknown_key_is_refused_with_the_keys_of_its_section(kind, own):
    for path, allowed, elsewhere in (
        ("windw", own, "speculative_tokens"),
        ("speculators_config.windw", "proposal_methods", own),
        ("speculators_config.verifier.windw", "name_or_path", own),
        (f"{METHODS}.0.windw", "speculative_tokens", own),
    ):
        text = refusal(kind, edited(kind, path, 8))
        keys = text.partition("allowed keys:")[2]
        assert f"unknown key {path!r}" in text and allowed in keys and elsewhere not in keys


KEYS = [("mtpc", key) for key in sorted(HeadConfig.model_fields.keys() - head_options() - {"drafter"})]
KEYS += [("ptp", key) for key in sorted(PtpConfig.model_fields.keys() - PTP_OPTIONS)]


@pytest.mark.parametrize("kind, path", [*KEYS, ("mtpc", VERIFIER), ("mtpc", f"{METHODS}.0.speculative_tokens")])
def test_every_key_is_required(kind, path):
    text = refusal(kind, edited(kind, path))
    assert repr(path) in text and "missing" in text


@pytest.mark.parametrize("kind", KINDS)
def test_content_that_is_not_a_head_config_is_refused(kind):
    assert "not a head's config" in (text := refusal(kind, TARGET)) and "speculators_model_type" in text
    for values in ([], "mtpc", 3, None):
        assert type(values).__name__ in refusal(kind, values)
    other = create("ptp" if kind == "mtpc" else "mtpc")
    assert "speculators_model_type" in refusal(kind, json.loads(other.to_json()))


@pytest.mark.parametrize(
    "kind, changes, words",
    [
        ("mtpc", {"window": 1}, ["window=1"]),
        ("mtpc", {"target": {"hidden_size": 8}}, ["vocab_size"]),
        ("mtpc", {"target": {"vocab_size": 8}}, ["hidden_size"]),
        ("ptp", {"target": {**TARGET, "num_hidden_layers": None}}, ["num_hidden_layers"]),
    ],
)
def test_impossible_head_is_not_created(kind, changes, words):
    with pytest.raises(HeadConfigError) as caught:
        create(kind, **changes)
    assert len(str(caught.value).splitlines()) == 1
    assert all(word in str(caught.value) for word in words), str(caught.value)
