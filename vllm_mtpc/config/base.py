"""The fields that the `config.json` of every head has.

The file follows the speculators convention, so that `vllm serve HEAD_FOLDER` finds the target, the method and the
number of drafts. Fields have no defaults on disk; unknown keys are errors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

from pydantic import ConfigDict, Field, model_validator
from typing_extensions import TypedDict

from vllm_mtpc.errors import HeadConfigError, validate
from vllm_mtpc.heads.sections import MAX_LIST, MAX_WIDTH, Section

if TYPE_CHECKING:
    from typing import Self

SPECULATORS_VERSION = "0.9.0"  # of the package whose schema the file follows

Size = Annotated[int, Field(ge=1, le=2**31)]


class TargetSizes(TypedDict, total=False):
    """The keys of a target's config that are copied into its head's."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # type: ignore[misc]

    model_type: str
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Annotated[int, Field(ge=1, le=4096)]
    num_attention_heads: Size
    num_key_value_heads: Size
    max_position_embeddings: Size
    vocab_size: Size


class ProposalMethod(Section):
    """An entry of speculators' `proposal_methods`."""

    proposal_type: Literal["greedy"] = Field(description="A chain of drafts, speculators' only kind.")
    speculative_tokens: int = Field(ge=1, description="Drafts per step, the verifier's own token not counted.")


class Verifier(Section):
    """The target by speculators' name."""

    name_or_path: str = Field(
        max_length=1024,
        pattern=r"^[^\p{C}\p{Zl}\p{Zp}]+$",  # printable
        description="The target: a hub name, or a path relative to the head's folder.",
    )
    architectures: list[str] = Field(max_length=MAX_LIST, description="The target's model classes.")


class SpeculatorsConfig(Section):
    """The section of `config.json` that speculators defines."""

    algorithm: Literal["mtpc", "ptp"] = Field(description="Same as speculators_model_type.")
    default_proposal_method: Literal["greedy"] = Field(description="The only one that exists.")
    proposal_methods: list[ProposalMethod] = Field(min_length=1, max_length=MAX_LIST, description="The first is used.")
    verifier: Verifier = Field(description="The model this head was trained for.")


class AnyHeadConfig(Section):
    """Base of all families: speculators' fields, sizes of the target, sampling of the training text."""

    architecture: ClassVar[str]  # a family's name for its heads
    version: ClassVar[int] = 2  # of the family's format
    target_sizes: ClassVar[tuple[str, ...]] = ("vocab_size", "hidden_size")  # required in a target's config

    architectures: list[str] = Field(max_length=MAX_LIST, description="The head's class, as speculators names it.")
    speculators_model_type: str = Field(description="The vLLM method this head is served with.")
    speculators_version: str = Field(description="Version of speculators whose schema the file follows.")
    speculators_config: SpeculatorsConfig = Field(description="Verifier and number of drafts.")
    transformer_layer_config: TargetSizes = Field(description="Sizes of the target, from its own config.")
    format_version: int = Field(description="Version of this format.")
    window: int = Field(ge=2, description="n, tokens of a window, x_1 included.")
    vocab_size: int = Field(ge=1, le=2**22, description="V, size of the target's vocabulary.")
    hidden_size: int = Field(ge=1, le=MAX_WIDTH, description="D, width of the hidden state.")
    trained_temperature: float = Field(gt=0, allow_inf_nan=False, description="Temperature of the training text.")
    trained_top_k: int = Field(ge=0, description="Top-k of that text; 0: off.")
    trained_top_p: float = Field(gt=0, le=1, description="Top-p of that text; 1: off.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for is_so, error in self.rows():
            if is_so:
                raise HeadConfigError(error)
        return self

    def rows(self) -> Iterator[tuple[object, str]]:
        """Yield what fields must not be together: whether they are, and the error. The first one is raised."""
        drafts, most, sizes = self.num_speculative_tokens, self.window - 1, self.transformer_layer_config
        missing = ", ".join({*self.target_sizes} - type(self).model_fields.keys() - sizes.keys())
        yield missing, f"transformer_layer_config: {missing} is missing; write the target's own number"
        wrong = f"speculative_tokens={drafts} with window={self.window}: its first token is x_1, so at most {most} can"
        yield drafts > most, f"{wrong} be drafted; lower speculative_tokens"

    @property
    def num_speculative_tokens(self) -> int:
        """K, the default number of drafts per step."""
        return self.speculators_config.proposal_methods[0].speculative_tokens

    @classmethod
    def create(
        cls, *, window: int, target: Any, verifier: str, num_speculative_tokens: int | None = None, **given: Any
    ) -> Self:
        """Return the config of a new head.

        Args:
            window: n, x_1 included.
            target: The transformers config of the target's language model, or its dict.
            verifier: Name of the target: a hub name, or a path relative to the head's folder.
            num_speculative_tokens: K, drafts per step; default n - 1.
            **given: Fields of the family; the others and those that are None have the family's defaults.

        Raises:
            HeadConfigError: A value is not possible.
        """
        sizes = target if isinstance(target, dict) else target.to_dict()
        for size in cls.target_sizes:
            if sizes.get(size) is None:
                raise HeadConfigError(f"the target's config has no {size}; pass the config of its language model")
        given = {name: value for name, value in given.items() if value is not None}
        method = get_args(cls.model_fields["speculators_model_type"].annotation)[0]
        drafts = max(1, window - 1) if num_speculative_tokens is None else num_speculative_tokens
        return cls.parse(
            {
                "architectures": [cls.architecture],
                "speculators_model_type": method,
                "speculators_version": SPECULATORS_VERSION,
                "speculators_config": {
                    "algorithm": method,
                    "default_proposal_method": "greedy",
                    "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": drafts}],
                    "verifier": {"name_or_path": verifier, "architectures": sizes.get("architectures") or []},
                },
                "transformer_layer_config": {
                    key: sizes[key] for key in TargetSizes.__annotations__ if type(sizes.get(key)) in (int, str)
                },
                "format_version": cls.version,
                "window": window,
                "vocab_size": sizes["vocab_size"],
                "hidden_size": sizes["hidden_size"],
                "trained_temperature": 1.0,
                "trained_top_k": 0,
                "trained_top_p": 1.0,
                **cls.complete(sizes, given),
            }
        )

    @classmethod
    def complete(cls, target: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        """Return `given` with the family's defaults and whole sections; `target` is the target's config."""
        raise NotImplementedError

    @classmethod
    def parse(cls, values: Any, source: str = "head config") -> Self:
        """Validate the content of a `config.json`. Raises HeadConfigError, in one line that starts with `source`."""
        if not isinstance(values, dict):
            raise HeadConfigError(f"{source}: holds a {type(values).__name__}; a JSON object is expected")
        if "speculators_model_type" not in values:
            raise HeadConfigError(
                f"{source}: not a head's config (key 'speculators_model_type' is missing); name a head folder"
            )
        if (version := values.get("format_version", cls.version)) != cls.version:
            remedy = f"allowed: {cls.version}; install the vllm_mtpc that wrote the head"
            raise HeadConfigError(f"{source}: format_version = {version!r}: {remedy}")
        return validate(cls, values, HeadConfigError, f"{source}: ")

    def to_json(self) -> str:
        """Return the text of `config.json`, without fields that are None."""
        return json.dumps(self.model_dump(exclude_none=True), indent=2) + "\n"
