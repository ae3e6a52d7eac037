"""The `config.json` of an MtPC head: a circuit, and the head that computes its parameters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, create_model

from vllm_mtpc.circuits import CIRCUITS, get_circuit
from vllm_mtpc.config.base import AnyHeadConfig, Strict
from vllm_mtpc.errors import HeadConfigError
from vllm_mtpc.heads import HEADS, HOSTED, check_head, default_options, head_options, option_fields

Options = create_model("Options", __base__=AnyHeadConfig, **option_fields())


class Drafter(Strict):
    """The drafter of vLLM whose states a head of kind `hosted` or `product` reads."""

    method: Literal["mtp", "eagle3", "dflash", "dspark"] = Field(description="vLLM's method of the drafter.")
    model: str | None = Field(None, description="Its checkpoint: hub name, or path from the head; none: the target.")

    @property
    def has_block(self) -> bool:
        """Whether one pass gives a state for every draft, not for the first one alone."""
        return self.method in ("dflash", "dspark")

    def place(self, folder: Path) -> str | None:
        """Return its checkpoint, a folder by its path from the head's or a hub name; None: the target's."""
        path = folder / (self.model or "")
        if self.model and self.model.startswith((".", "/")) and not path.is_dir():
            raise HeadConfigError(f"drafter: no folder {path.resolve()}; copy the checkpoint there, or correct model")
        return str(path.resolve()) if self.model and path.is_dir() else self.model

    def serving(self, folder: Path, num_drafts: int = 1) -> dict[str, Any]:
        """Return vLLM's own `speculative_config` of the drafter."""
        options = {"method": self.method, "num_speculative_tokens": num_drafts, "draft_sample_method": "greedy"}
        return options | ({"model": place} if (place := self.place(folder)) else {})


class HeadConfig(Options):  # type: ignore[valid-type,misc]  # created from the options of all head kinds
    """The config of an MtPC head. Options of the head kinds are fields, too (see `vllm_mtpc.heads`)."""

    architecture = "MtpcHeadModel"

    speculators_model_type: Literal["mtpc"] = Field(description="The vLLM method this head is served with.")
    draft_sample_method: Literal["probabilistic", "greedy"] = Field(description="How drafts are picked by default.")
    circuit: str = Field(description=f"Structure over the window: one of {', '.join(CIRCUITS)}.")
    num_components: int = Field(ge=1, description="r, latent states.")
    head: str = Field(description=f"How hidden states become circuit parameters: one of {', '.join(HEADS)}.")
    hidden_state_layer: Literal[-1] = Field(description="Which hidden state is read; -1: the last, after final norm.")
    lora_layers: Literal[0, 1, 2, 4] = Field(
        description="Last layers of the target with draft adapters, saved next to the head; served on Model Runner V2."
    )
    drafter: Drafter | None = Field(None, description="head hosted or product: the drafter whose states it reads.")
    x1_from: Literal["verifier"] = Field(description="Where the window's first token comes from.")

    def rows(self) -> Iterator[tuple[object, str]]:
        yield from super().rows()
        get_circuit(self.circuit, self.window, self.num_components)
        check_head(self.head, {name: getattr(self, name) for name in head_options()})
        remedy = 'write "drafter": {"method": "mtp"}, or remove it'
        wrong = f"drafter={self.drafter} with head {self.head!r}: heads 'hosted' and 'product' have one, others none"
        yield (self.head in HOSTED) != (self.drafter is not None), f"{wrong}; {remedy}"
        if not self.has_drafter:
            return
        r, layers, last = self.num_components, self.lora_layers, self.transformer_layer_config.get("num_hidden_layers")
        wrong = f"head {self.head!r} with num_components={r} needs component_rank, by which components differ"
        yield r > 1 and not self.component_rank, f"{wrong}; set it, for example to 32, or num_components to 1"
        wrong = f"lora_layers={layers} with head {self.head!r}, whose states are not the target's"
        yield layers, f"{wrong}; set lora_layers to 0"
        if self.head == "backbone":
            size, read = self.backbone_head_dim, self.aux_hidden_state_layer_ids
            yield size % 2, f"backbone_head_dim={size}: rotary positions need an even number; set it to one"
            allowed = f"rising numbers from 0 to {last or 'the layers of the target'}"
            is_wrong = read != sorted(set(read)) or (last is not None and read[-1] > last)
            yield is_wrong, f"aux_hidden_state_layer_ids={read}: allowed: {allowed}; correct them"

    @property
    def has_drafter(self) -> bool:
        """Whether the head reads the states of a drafter, its own or a hosted one, instead of the target's."""
        return self.head in ("backbone", *HOSTED)

    @property
    def has_draft_layers(self) -> bool:
        """Whether the head has draft layers, which need Model Runner V2."""
        return self.lora_layers > 0 or self.has_drafter

    @classmethod
    def defaults(cls, window: int, target: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        get_circuit(given["circuit"], window, given["num_components"])
        head = given.get("head", "linear")
        return {
            "draft_sample_method": "probabilistic",
            "head": head,
            "hidden_state_layer": -1,
            "lora_layers": 0,
            "x1_from": "verifier",
            **default_options(head, target),
        }
