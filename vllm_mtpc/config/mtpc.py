"""The `config.json` of an MtPC head: a circuit, and the head that gives its parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, create_model, model_validator

from vllm_mtpc.circuits import CIRCUITS, get_circuit
from vllm_mtpc.config.base import AnyHeadConfig
from vllm_mtpc.heads import HEADS, check_head, check_support, default_options, head_options, option_fields

if TYPE_CHECKING:
    from typing import Self

Options = create_model("Options", __base__=AnyHeadConfig, **option_fields())


class HeadConfig(Options):
    """Everything that is needed to rebuild and serve an MtPC head."""

    architecture = "MtpcHeadModel"

    speculators_model_type: Literal["mtpc"] = Field(description="The vLLM method this head is served with.")
    draft_sample_method: Literal["probabilistic", "greedy"] = Field(description="How drafts are picked by default.")
    circuit: str = Field(description=f"Structure over the window: one of {', '.join(CIRCUITS)}.")
    num_components: int = Field(ge=1, description="r, latent states.")
    head: str = Field(description=f"How hidden states become circuit parameters: one of {', '.join(HEADS)}.")
    hidden_state_layer: Literal[-1] = Field(description="Which hidden state is read; -1: the last, after final norm.")
    lora_layers: Literal[0, 1, 2, 4] = Field(
        description="Last layers of the target with draft adapters, saved beside the head; served on Model Runner V2."
    )
    x1_from: Literal["verifier"] = Field(description="Where the window's first token comes from.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        get_circuit(self.circuit, self.window, self.num_components)
        check_head(self.head, self.hidden_size, {name: getattr(self, name) for name in head_options()})
        check_support(self.vocab_size, self.num_components, self.support, self.component_rank)
        return self

    @classmethod
    def defaults(cls, window: int, hidden_size: int, given: dict[str, Any]) -> dict[str, Any]:
        get_circuit(given["circuit"], window, given["num_components"])
        head = given.get("head", "linear")
        return {
            "draft_sample_method": "probabilistic",
            "head": head,
            "hidden_state_layer": -1,
            "lora_layers": 0,
            "x1_from": "verifier",
            **default_options(head, hidden_size),
        }
