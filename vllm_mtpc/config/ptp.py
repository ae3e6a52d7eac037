"""The `config.json` of a PTP head."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from vllm_mtpc.config.base import MAX_HIDDEN_SIZE, AnyHeadConfig

if TYPE_CHECKING:
    from typing import Self

MAX_WINDOW = 256
SUM_TOLERANCE = 1e-4  # what the sum of `accepted` may miss of 1: it is written in decimals


class PtpConfig(AnyHeadConfig):
    """Everything that is needed to rebuild and serve a PTP head.

    The sampling that it was trained for (trained_temperature, ...) is that of the distribution which u picks from.
    """

    architecture = "PtpHeadModel"
    target_sizes = (*AnyHeadConfig.target_sizes, "num_hidden_layers")

    speculators_model_type: Literal["ptp"] = Field(description="The vLLM method this head is served with.")
    variant: Literal["o-ptp", "c-ptp"] = Field(
        description="o-ptp: the argmax of the row that carries u_k is token k; c-ptp: the row that carries u_(k-1) "
        "gives the distribution that u_k picks token k from."
    )
    informed: bool = Field(
        description="Whether rows carry u; false: 0.5 on every row, without law_trust the independent baseline."
    )
    window: int = Field(ge=2, le=MAX_WINDOW, description="n, auxiliary rows; at most n - 1 drafts.")
    u_embedding: str = Field(description="How u becomes the embedding of a row (vllm_mtpc.heads.ptp.embedding).")
    u_features: int | None = Field(None, description="Features or rows of the embedding, where it may vary.")
    u_hidden: int | None = Field(None, ge=1, le=MAX_HIDDEN_SIZE, description="Embeddings in -mlp: their hidden layer.")
    late_width: int = Field(
        0,
        ge=0,
        le=MAX_HIDDEN_SIZE,
        description="Width of the late network, behind the final norm; 0: none, as in the paper.",
    )
    law_trust: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="How far a row's distribution is trusted when u picks the draft from it "
        "(vllm_mtpc.heads.ptp.distribution); absent: as in the paper, o-ptp takes the argmax, c-ptp what u picks.",
    )
    lora_rank: int = Field(ge=1, le=MAX_HIDDEN_SIZE, description="r of the adapters of every layer of the target.")
    lora_alpha: float = Field(gt=0, allow_inf_nan=False, description="The adapters' update is alpha / r * B A.")
    accepted: list[float] | None = Field(
        None,
        strict=False,  # a tuple is as good
        description="P(exactly g of the n - 1 drafts are accepted), g = 0 to n - 1, measured; absent: not measured.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        from vllm_mtpc.heads.ptp.embedding import check_embedding

        check_embedding(self.u_embedding, self.u_features, self.u_hidden)
        shares, remedy = self.accepted, "measure the head again, or remove accepted"
        if shares is None:
            return self
        if not all(math.isfinite(share) and share >= 0 for share in shares):
            raise ValueError(f"accepted: probabilities are numbers from 0; {remedy}")
        if abs(math.fsum(shares) - 1) > SUM_TOLERANCE:
            raise ValueError(f"accepted: its sum is {math.fsum(shares):.6g}, not 1; {remedy}")
        if len(shares) != self.window:
            raise ValueError(
                f"accepted has {len(shares)} entries with window={self.window}: one for each of 0 to "
                f"{self.window - 1} accepted drafts; {remedy}"
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
    def defaults(cls, window: int, target: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        from vllm_mtpc.heads.ptp.embedding import default_options

        name = given.get("u_embedding", "ieee")
        own = {"informed": True, "u_embedding": name, "late_width": 0, "lora_rank": 16, "lora_alpha": 16.0}
        return own | default_options(name, target["hidden_size"])
