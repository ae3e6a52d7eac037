"""The `config.json` of a PTP head."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from vllm_mtpc.config.base import AnyHeadConfig
from vllm_mtpc.heads.sections import MAX_WIDTH

LATE_OPTIONS = ("late_width", "distribution_trust")  # options of variant late alone
TRUST = 0.85  # default; 0.8 to 0.87 gave the same tokens/step on the demo
SUM_TOLERANCE = 1e-4  # of the sum of `accepted`, which is written in decimals


class PtpConfig(AnyHeadConfig):
    """The config of a PTP head. `trained_temperature`, ... are those of the distribution that u picks from."""

    architecture = "PtpHeadModel"
    target_sizes = (*AnyHeadConfig.target_sizes, "num_hidden_layers")

    speculators_model_type: Literal["ptp"] = Field(description="The vLLM method this head is served with.")
    variant: Literal["o-ptp", "c-ptp", "late", "independent"] = Field(
        description="o-ptp: the argmax of the row that carries u_k is token k; c-ptp: the row that carries u_(k-1) "
        "gives the distribution that u_k picks token k from. Not in the paper: late, rows that carry 0.5, then a "
        "network that drafts token by token, from whose distributions u picks; independent, the baseline, the argmax "
        "of rows that carry 0.5."
    )
    window: int = Field(ge=2, le=256, description="n, auxiliary rows; at most n - 1 drafts.")
    u_embedding: str = Field(description="The embedding of u (vllm_mtpc.heads.ptp.layers).")
    u_features: int = Field(ge=1, le=4096, description="n, features of the embedding.")
    late_width: int | None = Field(None, ge=1, le=MAX_WIDTH, description="Variant late: width of its network.")
    distribution_trust: float | None = Field(
        None, gt=0, lt=1, description="Variant late: trust in its distributions (vllm_mtpc.heads.ptp.distribution)."
    )
    lora_rank: int = Field(ge=1, le=MAX_WIDTH, description="r of the adapters of every layer of the target.")
    lora_alpha: float = Field(gt=0, allow_inf_nan=False, description="The adapters' update is alpha / r * B A.")
    # P(exactly g of the n - 1 drafts are accepted), g = 0 to n - 1; a tuple is as good
    accepted: list[Annotated[float, Field(ge=0, allow_inf_nan=False)]] | None = Field(
        None, strict=False, description="P(exactly g drafts are accepted), g = 0 to n - 1; absent: not measured."
    )

    @field_validator("u_embedding")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if name != "threshold":
            raise ValueError("since 0.4 'threshold' is the only one; train the head again")
        return name

    def rows(self) -> Iterator[tuple[object, str]]:
        yield from super().rows()
        remedy = "set it" if self.variant == "late" else "remove it"
        for key in LATE_OPTIONS:
            wrong = f"{key}={getattr(self, key)} with variant {self.variant!r}: variant late has it and no other"
            yield (getattr(self, key) is not None) != (self.variant == "late"), f"{wrong}; {remedy}"
        if (shares := self.accepted) is not None:
            remedy = "measure the head again, or remove accepted"
            wrong = f"accepted has {len(shares)} entries with window={self.window}, one for each number of drafts"
            yield len(shares) != self.window, f"{wrong}; {remedy}"
            total = math.fsum(shares)
            yield abs(total - 1) > SUM_TOLERANCE, f"accepted: its sum is {total:.6g}, not 1; {remedy}"

    @property
    def informed(self) -> bool:
        """Whether rows carry u, as in the paper; otherwise every row carries 0.5."""
        return self.variant in ("o-ptp", "c-ptp")

    @property
    def uses_u(self) -> bool:
        """Whether drafts at a temperature above 0 depend on u."""
        return self.variant != "independent"

    @property
    def picks(self) -> bool:
        """Whether u picks a draft from its row's distribution at a temperature above 0, and not its argmax."""
        return self.variant in ("c-ptp", "late")

    @property
    def first_row(self) -> int:
        """The row of a window that gives its first draft: row 0 of other variants than c-ptp gives x_1."""
        return 0 if self.variant == "c-ptp" else 1

    @property
    def num_layers(self) -> int:
        """Layers of the target. All have adapters."""
        return self.transformer_layer_config["num_hidden_layers"]

    @classmethod
    def complete(cls, target: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        own = {"u_embedding": "threshold", "u_features": 64, "lora_rank": 16, "lora_alpha": 16.0}
        if given.get("variant") == "late":
            own |= {"late_width": target["hidden_size"], "distribution_trust": TRUST}
        return own | given
