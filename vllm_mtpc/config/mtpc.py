"""A head's `config.json`: every field described, nothing inferred, unknown keys refused.

The file follows the speculators convention, so that `vllm serve HEAD_FOLDER` finds the verifier, the
method and the number of drafts by itself.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from vllm_mtpc.circuits import CIRCUITS
from vllm_mtpc.errors import HeadConfigError, one_line
from vllm_mtpc.files import read_json

if TYPE_CHECKING:
    from typing import Self

FORMAT_VERSION = 2
SPECULATORS_VERSION = "0.9.0"  # of the package whose schema accepts what is written
# Beyond any model; they keep the sizes of a damaged config within what can be multiplied and refused by shape.
MAX_VOCAB_SIZE = 2**22
MAX_HIDDEN_SIZE = 2**17
MAX_EXPANDER_LAYERS = 64
MAX_LAYERS = 4096  # of a target
MAX_SIZE = 2**31  # of any other number of a target's config
MAX_LIST = 16  # entries of a list
MAX_TEXT = 1024  # characters of a name or path

# What of a target's config travels with its head: enough for a reader to know what it was made for.
TARGET_KEYS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "vocab_size",
)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ProposalMethod(_Strict):
    proposal_type: Literal["greedy"] = Field(
        description="A chain of drafts, speculators' only kind; how it is drawn: draft_sample_method."
    )
    speculative_tokens: int = Field(ge=1, description="Drafts per step, the verifier's own token not counted.")


class Verifier(_Strict):
    name_or_path: str = Field(
        min_length=1,
        max_length=MAX_TEXT,
        description="The target: a name on the hub, or a path, which starts at the head's folder.",
    )
    architectures: list[str] = Field(max_length=MAX_LIST, description="The target's model classes.")

    @field_validator("name_or_path")
    @classmethod
    def _can_be_shown(cls, value: str) -> str:
        if not value.isprintable():
            raise ValueError("a name or path of printable characters is expected; correct it")
        return value


class SpeculatorsConfig(_Strict):
    algorithm: Literal["mtpc", "ptp"] = Field(description="Same as speculators_model_type.")
    default_proposal_method: Literal["greedy"] = Field(description="The only one there is.")
    proposal_methods: list[ProposalMethod] = Field(
        min_length=1, max_length=MAX_LIST, description="The first one is used."
    )
    verifier: Verifier = Field(description="The model this head was trained for.")


class AnyHeadConfig(_Strict):
    """What the `config.json` of every head says: the fields of speculators' schema, and the sizes of the target."""

    architectures: list[str] = Field(
        max_length=MAX_LIST, description="Name of the head's class, for the speculators convention."
    )
    speculators_model_type: Literal["mtpc", "ptp"] = Field(description="The vLLM method this head is served with.")
    speculators_version: str = Field(description="Version of speculators whose schema the file follows.")
    speculators_config: SpeculatorsConfig = Field(description="Verifier and number of drafts.")
    transformer_layer_config: dict[str, Any] = Field(description="Sizes of the target, from its own config.")
    format_version: int = Field(description="Version of this format.")
    window: int = Field(ge=2, description="n, tokens a draft spans, the verifier's token included.")
    vocab_size: int = Field(ge=1, le=MAX_VOCAB_SIZE, description="V, token ids the target knows.")
    hidden_size: int = Field(ge=1, le=MAX_HIDDEN_SIZE, description="D, width of the hidden state.")

    @field_validator("format_version")
    @classmethod
    def _known_version(cls, value: int) -> int:
        if value != FORMAT_VERSION:
            raise ValueError(
                f"this version reads formats 1 and {FORMAT_VERSION}; install the vllm_mtpc that wrote the head"
            )
        return value

    @field_validator("transformer_layer_config")
    @classmethod
    def _sizes(cls, value: dict[str, Any]) -> dict[str, Any]:
        for key, size in value.items():
            if key not in TARGET_KEYS:
                raise ValueError(f"unknown {key!r}; allowed: {', '.join(TARGET_KEYS)}; remove it")
            most = MAX_LAYERS if key == "num_hidden_layers" else MAX_SIZE
            if not (isinstance(size, str) if key == "model_type" else type(size) is int and 1 <= size <= most):
                allowed = "a name" if key == "model_type" else f"1 to {most}"
                raise ValueError(f"{key} = {size!r}; allowed: {allowed}; write the target's own")
        return value

    @model_validator(mode="after")
    def _drafts_fit(self) -> AnyHeadConfig:
        if (named := self.speculators_config.algorithm) != self.speculators_model_type:
            raise ValueError(
                f"speculators_config.algorithm = {named!r}; allowed: {self.speculators_model_type!r}, as "
                "speculators_model_type says; correct one of them"
            )
        drafts = self.num_speculative_tokens
        if drafts > self.window - 1:
            raise ValueError(
                f"speculative_tokens={drafts} with window={self.window}: the first token of a window is the "
                f"verifier's, so at most {self.window - 1} can be drafted; lower speculative_tokens"
            )
        return self

    @property
    def num_speculative_tokens(self) -> int:
        """K, drafts per step when the user names none."""
        return self.speculators_config.proposal_methods[0].speculative_tokens

    @staticmethod
    def describe(method: str, architecture: str, target: dict[str, Any], verifier: str, drafts: int) -> dict[str, Any]:
        """The fields of this class for a new head of `method` for a target of this config (as a dict)."""
        sizes = {key: target[key] for key in TARGET_KEYS if type(target.get(key)) in (int, str)}
        return {
            "architectures": [architecture],
            "speculators_model_type": method,
            "speculators_version": SPECULATORS_VERSION,
            "speculators_config": {
                "algorithm": method,
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": drafts}],
                "verifier": {"name_or_path": verifier, "architectures": target.get("architectures") or []},
            },
            "transformer_layer_config": sizes,
            "format_version": FORMAT_VERSION,
            "vocab_size": target["vocab_size"],
            "hidden_size": target["hidden_size"],
        }

    @classmethod
    def parse(cls, values: Any, source: str = "head config") -> Self:
        """Validate a dict; raises HeadConfigError with one line that starts with `source`."""
        if not isinstance(values, dict):
            raise HeadConfigError(f"{source}: holds a {type(values).__name__}; a JSON object is expected")
        if "speculators_model_type" not in values:
            raise HeadConfigError(
                f"{source}: not a head's config (key 'speculators_model_type' is missing); name a head folder"
            )
        try:
            return cls.model_validate(_upgraded(values))
        except ValidationError as error:
            raise HeadConfigError(f"{source}: {one_line(error, cls)}") from None

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read and validate a `config.json`; raises CheckpointError or HeadConfigError."""
        return cls.parse(read_json(file), str(file))


def _upgraded(values: dict[str, Any]) -> dict[str, Any]:
    """Format 1 as format 2: how drafts are drawn was a proposal type, where speculators' schema has "greedy" alone."""
    theirs = values.get("speculators_config")
    if values.get("format_version") != 1 or not isinstance(theirs, dict):
        return values
    methods = theirs.get("proposal_methods")
    if isinstance(methods, list):
        methods = [{**part, "proposal_type": "greedy"} if isinstance(part, dict) else part for part in methods]
    named = {"draft_sample_method": theirs.get("default_proposal_method")}
    return {
        **values,
        **(named if values["speculators_model_type"] == "mtpc" else {}),
        "format_version": FORMAT_VERSION,
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {**theirs, "default_proposal_method": "greedy", "proposal_methods": methods},
    }


class HeadConfig(AnyHeadConfig):
    """Everything that is needed to rebuild and serve an MtPC head."""

    speculators_model_type: Literal["mtpc"] = Field(description="The vLLM method this head is served with.")
    draft_sample_method: Literal["probabilistic", "greedy"] = Field(description="How drafts are picked by default.")
    circuit: str = Field(description=f"Structure over the window: one of {', '.join(CIRCUITS)}.")
    window: int = Field(ge=2, description="n, tokens the circuit spans, the verifier's token included.")
    num_components: int = Field(ge=1, description="r, latent states.")
    head: str = Field(
        description="How hidden states become circuit parameters: linear, shared (in front of the target's own "
        "lm_head), mlp or transformer."
    )
    expander_rank: int | None = Field(
        default=None, ge=1, le=MAX_HIDDEN_SIZE, description="Head shared: width of the low-rank expander."
    )
    expander_layers: int | None = Field(
        default=None, ge=1, le=MAX_EXPANDER_LAYERS, description="Heads mlp and transformer: blocks of the expander."
    )
    expander_heads: int | None = Field(
        default=None, ge=1, le=MAX_HIDDEN_SIZE, description="Head transformer: attention heads of a block."
    )
    hidden_state_layer: Literal[-1] = Field(description="Which hidden state is read; -1: the last, after final norm.")
    lora_layers: Literal[0, 1, 2, 4] = Field(
        description="Last layers of the target with draft adapters, saved beside the head; served on Model Runner V2."
    )
    x1_from: Literal["verifier"] = Field(description="Where the window's first token comes from.")
    trained_temperature: float = Field(
        gt=0, allow_inf_nan=False, description="Temperature of the text the head was trained on."
    )
    trained_top_k: int = Field(ge=0, description="Top-k of that text; 0: off.")
    trained_top_p: float = Field(gt=0, le=1, description="Top-p of that text; 1: off.")

    @model_validator(mode="after")
    def _consistent(self) -> HeadConfig:
        from vllm_mtpc.circuits import get_circuit
        from vllm_mtpc.heads import OPTIONS, check_head

        get_circuit(self.circuit, self.window, self.num_components)
        check_head(self.head, self.hidden_size, {key: getattr(self, key) for key in OPTIONS})
        return self

    @classmethod
    def create(
        cls,
        *,
        circuit: str,
        window: int,
        num_components: int,
        target: Any,
        verifier: str,
        head: str = "linear",
        expander_rank: int | None = None,
        expander_layers: int | None = None,
        expander_heads: int | None = None,
        lora_layers: int = 0,
        num_speculative_tokens: int | None = None,
        trained_temperature: float = 1.0,
        trained_top_k: int = 0,
        trained_top_p: float = 1.0,
    ) -> HeadConfig:
        """The config of a new head for `target`, a transformers config (or its dict).

        Options of the head that are not named take its defaults (`vllm_mtpc.heads.default_options`). Raises
        HeadConfigError where a size or a name is not possible.
        """
        from vllm_mtpc.circuits import get_circuit
        from vllm_mtpc.heads import default_options

        get_circuit(circuit, window, num_components)
        values = target if isinstance(target, dict) else target.to_dict()
        for size in ("vocab_size", "hidden_size"):
            if values.get(size) is None:
                raise HeadConfigError(f"the target's config has no {size}; give the config of its language model")
        drafts = window - 1 if num_speculative_tokens is None else num_speculative_tokens
        given = {"expander_rank": expander_rank, "expander_layers": expander_layers, "expander_heads": expander_heads}
        options = default_options(head, values["hidden_size"])
        options |= {key: value for key, value in given.items() if value is not None}
        return cls.parse(
            {
                **cls.describe("mtpc", "MtpcHeadModel", values, verifier, drafts),
                "draft_sample_method": "probabilistic",
                "circuit": circuit,
                "window": window,
                "num_components": num_components,
                "head": head,
                **options,
                "hidden_state_layer": -1,
                "lora_layers": lora_layers,
                "x1_from": "verifier",
                "trained_temperature": trained_temperature,
                "trained_top_k": trained_top_k,
                "trained_top_p": trained_top_p,
            }
        )

    def to_json(self) -> str:
        """The text of `config.json`; options that the head does not have are left out."""
        from vllm_mtpc.heads import OPTIONS

        absent = {key for key in OPTIONS if getattr(self, key) is None}
        return json.dumps(self.model_dump(exclude=absent), indent=2) + "\n"
