"""The `config.json` of a PTP head: every field described, nothing inferred, unknown keys refused.

It follows the speculators convention as `vllm_mtpc.config.mtpc` does for circuits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from vllm_mtpc.config.mtpc import MAX_HIDDEN_SIZE, AnyHeadConfig
from vllm_mtpc.errors import HeadConfigError

VARIANTS = ("o-ptp", "c-ptp")
MAX_WINDOW = 256
# What the sum of `accepted` may miss of 1: it is written in decimals.
SUM_TOLERANCE = 1e-4


class PtpConfig(AnyHeadConfig):
    """Everything that is needed to rebuild and serve a PTP head."""

    speculators_model_type: Literal["ptp"] = Field(description="The vLLM method this head is served with.")
    variant: Literal["o-ptp", "c-ptp"] = Field(
        description="o-ptp: the argmax of the row that carries u_k is token k; c-ptp: the row that carries u_(k-1) "
        "gives the law that u_k picks token k from."
    )
    informed: bool = Field(
        description="Whether rows carry u; false: 0.5 on every row, without law_trust the independent baseline."
    )
    window: int = Field(ge=2, le=MAX_WINDOW, description="n, auxiliary rows; at most n - 1 drafts.")
    u_embedding: str = Field(description="How u becomes the embedding of a row (vllm_mtpc.heads.ptp.embedding).")
    u_features: int | None = Field(default=None, description="Features or rows of the embedding, where it may vary.")
    u_hidden: int | None = Field(
        default=None, ge=1, le=MAX_HIDDEN_SIZE, description="Embeddings in -mlp: width of the hidden layer."
    )
    late_width: int = Field(
        default=0,
        ge=0,
        le=MAX_HIDDEN_SIZE,
        description="Width of the late network, with which rows pick behind the final norm; 0: none, as in the paper.",
    )
    law_trust: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="How far a row's law is trusted when u picks the draft from it (vllm_mtpc.heads.ptp.trust); "
        "absent: as in the paper, o-ptp takes the argmax, c-ptp what u picks.",
    )
    lora_rank: int = Field(ge=1, le=MAX_HIDDEN_SIZE, description="r of the adapters of every layer of the target.")
    lora_alpha: float = Field(gt=0, allow_inf_nan=False, description="The adapters' update is alpha / r * B A.")
    trained_temperature: float = Field(gt=0, allow_inf_nan=False, description="Temperature of the law u picks from.")
    trained_top_k: int = Field(ge=0, description="Top-k of that law; 0: off.")
    trained_top_p: float = Field(gt=0, le=1, description="Top-p of that law; 1: off.")
    accepted: list[float] | None = Field(
        default=None,
        description="P(exactly g of the n - 1 drafts are accepted), g = 0 to n - 1, measured; absent: not measured.",
    )

    @field_validator("accepted")
    @classmethod
    def _is_law(cls, value: list[float] | None) -> list[float] | None:
        if value is None:
            return None
        if not all(math.isfinite(part) and part >= 0 for part in value):
            raise ValueError("probabilities are numbers from 0; measure the head again, or remove the key")
        if abs(math.fsum(value) - 1) > SUM_TOLERANCE:
            raise ValueError(f"its sum is {math.fsum(value):.6g}, not 1; measure the head again, or remove the key")
        return value

    @field_validator("transformer_layer_config")
    @classmethod
    def _has_layers(cls, value: dict[str, Any]) -> dict[str, Any]:
        if "num_hidden_layers" not in value:
            raise ValueError("num_hidden_layers is missing; write the target's own number")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> PtpConfig:
        from vllm_mtpc.heads.ptp.embedding import check_embedding

        check_embedding(self.u_embedding, self.u_features, self.u_hidden)
        if self.accepted is not None and len(self.accepted) != self.window:
            raise ValueError(
                f"accepted has {len(self.accepted)} entries with window={self.window}: one for each of 0 to "
                f"{self.window - 1} accepted drafts; measure the head again, or remove accepted"
            )
        return self

    @property
    def uses_u(self) -> bool:
        """Whether drafts at a temperature above 0 depend on u at all; not those of the independent baseline."""
        return self.informed or self.law_trust is not None

    @property
    def num_layers(self) -> int:
        """Layers of the target, every one of them with adapters."""
        return self.transformer_layer_config["num_hidden_layers"]

    @classmethod
    def create(
        cls,
        *,
        variant: str,
        window: int,
        target: Any,
        verifier: str,
        informed: bool = True,
        u_embedding: str = "ieee",
        u_features: int | None = None,
        u_hidden: int | None = None,
        late_width: int = 0,
        law_trust: float | None = None,
        lora_rank: int = 16,
        lora_alpha: float = 16.0,
        num_speculative_tokens: int | None = None,
        trained_temperature: float = 1.0,
        trained_top_k: int = 0,
        trained_top_p: float = 1.0,
        accepted: Sequence[float] | None = None,
    ) -> PtpConfig:
        """The config of a new head for `target`, a transformers config (or its dict).

        Options of the embedding that are not named take its defaults. Raises HeadConfigError where a size or a name is
        not possible.
        """
        from vllm_mtpc.heads.ptp.embedding import default_options

        values = target if isinstance(target, dict) else target.to_dict()
        for size in ("vocab_size", "hidden_size", "num_hidden_layers"):
            if values.get(size) is None:
                raise HeadConfigError(f"the target's config has no {size}; give the config of its language model")
        drafts = max(1, window - 1) if num_speculative_tokens is None else num_speculative_tokens
        given = {"u_features": u_features, "u_hidden": u_hidden}
        options = default_options(u_embedding, values["hidden_size"])
        options |= {key: value for key, value in given.items() if value is not None}
        return cls.parse(
            {
                **cls.describe("ptp", "PtpHeadModel", values, verifier, drafts),
                "variant": variant,
                "informed": informed,
                "window": window,
                "u_embedding": u_embedding,
                **options,
                "late_width": late_width,
                "law_trust": law_trust,
                "lora_rank": lora_rank,
                "lora_alpha": lora_alpha,
                "trained_temperature": trained_temperature,
                "trained_top_k": trained_top_k,
                "trained_top_p": trained_top_p,
                "accepted": None if accepted is None else [float(part) for part in accepted],
            }
        )

    def to_json(self) -> str:
        """The text of `config.json`; what the head does not have is left out."""
        return json.dumps(self.model_dump(exclude_none=True), indent=2) + "\n"
