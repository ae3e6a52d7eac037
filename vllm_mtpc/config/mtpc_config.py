"""The `config.json` of an MtPC head: its three parts, and its draft vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from vllm_mtpc.circuits import CIRCUITS, get_circuit
from vllm_mtpc.config.base import AnyHeadConfig
from vllm_mtpc.heads import default_leaves, default_trunk
from vllm_mtpc.heads.leaves import LEAVES
from vllm_mtpc.heads.sections import Section
from vllm_mtpc.heads.trunk import TRUNKS


class CircuitSection(Section):
    """Section of `config.json`."""

    kind: str = Field(description=f"Structure over the window: one of {', '.join(CIRCUITS)}.")
    num_components: int = Field(ge=1, description="r, latent states.")


class HeadConfig(AnyHeadConfig):
    """The config of an MtPC head."""

    architecture = "MtpcHeadModel"
    version = 3

    speculators_model_type: Literal["mtpc"] = Field(description="The vLLM method this head is served with.")
    draft_sample_method: Literal["probabilistic", "greedy"] = Field(description="How drafts are picked by default.")
    circuit: CircuitSection = Field(description="Structure over the window.")
    trunk: Annotated[Any, BeforeValidator(TRUNKS.parse)] = Field(description="The states that leaves read.")
    leaves: Annotated[Any, BeforeValidator(LEAVES.parse)] = Field(description="From states to log-probabilities.")
    draft_vocab_size: int | None = Field(None, ge=1, le=2**22, description="Number of ids in d2t; absent: all ids.")

    def rows(self) -> Iterator[tuple[object, str]]:
        yield from super().rows()
        r = self.num_components
        get_circuit(self.circuit.kind, self.window, r)
        trunk, last = self.trunk, self.transformer_layer_config.get("num_hidden_layers")
        ids = self.draft_vocab_size
        wrong = f"draft_vocab_size={ids} with vocab_size={self.vocab_size}: allowed are smaller numbers"
        yield ids and ids >= self.vocab_size, f"{wrong}; lower it, or leave it out for all ids"
        if self.leaves.kind == "lm_head":
            is_same = r > 1 and not self.leaves.component_rank and not self.leaves.expander_rank
            wrong = f"leaves.component_rank=0 and expander_rank=0 with num_components={r}, which are then equal"
            yield is_same, f"{wrong}; set leaves.component_rank, for example to 16, or num_components to 1"
        if trunk.kind == "backbone":
            read = trunk.aux_hidden_state_layer_ids
            allowed = f"numbers from 0 to {last or 'the layers of the target'}"
            wrong = f"trunk.aux_hidden_state_layer_ids={read}: allowed: {allowed}; correct them"
            yield last is not None and read[-1] > last, wrong

    @property
    def num_components(self) -> int:
        """r, the number of latent states."""
        return self.circuit.num_components

    @property
    def lora_layers(self) -> int:
        """Number of the target's last layers with adapters."""
        return self.trunk.layers if self.trunk.kind == "lora" else 0

    @property
    def hosted(self) -> Any:
        """The section of the drafter whose states the head reads; None without."""
        return self.trunk if self.trunk.kind == "drafter" else None

    @property
    def has_draft_layers(self) -> bool:
        """Whether the head has draft layers, which need Model Runner V2."""
        return self.trunk.kind in ("backbone", "drafter") or self.lora_layers > 0

    @classmethod
    def complete(cls, target: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        """As in AnyHeadConfig; `circuit` and `num_components` of `given` become one section."""
        circuit = {"kind": given.pop("circuit"), "num_components": given.pop("num_components", 1)}
        trunk, leaves = given.get("trunk", {}), given.get("leaves", {})
        trunk = {"kind": default_trunk(target["vocab_size"]), **trunk}
        leaves = {"kind": default_leaves(target["vocab_size"]), **leaves}
        whole = LEAVES.with_defaults(leaves, target)
        if trunk["kind"] in ("backbone", "drafter") and leaves["kind"] == "lm_head":
            whole |= {"component_rank": 16} | ({"expander_rank": 0} if trunk["kind"] == "backbone" else {}) | leaves
        given = {"draft_sample_method": "probabilistic", **given}
        return given | {"circuit": circuit, "trunk": TRUNKS.with_defaults(trunk, target), "leaves": whole}
