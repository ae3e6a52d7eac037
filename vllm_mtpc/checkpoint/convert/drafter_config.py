"""What the config.json of a DFlash or DSpark checkpoint says, in speculators' layout or in its authors'.

    speculators   its own keys at the top (aux_hidden_state_layer_ids, ...), draft layers in transformer_layer_config
    z-lab/dflash  a transformers config of the draft layers, its own keys in dflash_config (target_layer_ids, ...)
    DeepSpec      such a config, its own keys at the top; it also trains drafters without a Markov head: DFlash

Two things are counted apart. Layers that are read: speculators counts those before the state (id i: what enters layer
i), the authors name the layer that gives it (i - 1). Blocks: from the anchor on (DSpark's own layout) every query gives
the next token, so that a block of b queries drafts b tokens; else the first query is x_1 alone, b - 1 tokens. Whatever
would make the drafts other than a backbone head's is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vllm_mtpc.errors import CheckpointError

SPECULATORS = ("dflash", "dspark")
AUTHORS = {"DFlashDraftModel": "dflash", "Qwen3DSparkModel": "dspark"}
_DFLASH_KEYS = (
    *("block_size", "causal", "mask_token_id", "sample_from_anchor", "swa_window_size", "target_layer_ids"),
    "use_aux_hidden_state",
)
_ROPE_KEYS = ("rope_theta", "rope_type", "type", "partial_rotary_factor")
_MISSING = object()


class Drafter(NamedTuple):
    """A checkpoint's config: the options of a backbone head, and what else is read of its tensors."""

    layout: str  # as provenance calls it
    window: int
    drafts: int  # of a step
    options: dict[
        str, Any
    ]  # backbone_..., aux_hidden_state_layer_ids, sample_from_anchor; sizes as far as it says them
    mask_token_id: int
    markov_rank: int
    trained_on: str | None


def read_drafter(file: Path, values: Mapping[str, Any], target: Mapping[str, Any]) -> Drafter:
    """Raises CheckpointError with the first thing in `values`, of `file`, that a backbone head has not."""
    given = _Given(file, values)
    kind = given.kind()
    given.check_target(target)
    given.check_layers(target)
    markov_rank = given.count("markov_rank", 0) if kind == "dspark" else 0
    if markov_rank:
        given.only("markov_head_type", ("vanilla",), "vanilla")
    anchor = given.flag("sample_from_anchor", kind == "dspark" and not given.speculators)
    block = given.count("block_size", 1 if anchor else 2)
    drafts = block if anchor else block - 1
    return Drafter(
        f"{'speculators' if given.speculators else 'its authors'}' {kind}",
        drafts + 1,
        min(given.proposed() or drafts, drafts),
        {
            **given.sizes(),
            "aux_hidden_state_layer_ids": given.layer_ids(target),
            "sample_from_anchor": anchor,
        },
        given.count("mask_token_id", 0),
        markov_rank,
        given.verifier(),
    )


class _Given:
    """Keys where the layouts have them. `layer`: the config of the draft layers."""

    def __init__(self, file: Path, values: Mapping[str, Any]) -> None:
        self.file, self.values = file, values
        self.speculators = "speculators_model_type" in values
        self.layer = self._section("transformer_layer_config") if self.speculators else values
        self.dflash = {} if self.speculators else self._section("dflash_config")

    def _section(self, key: str) -> Mapping[str, Any]:
        section = self.values.get(key)
        return section if isinstance(section, dict) else {}

    def refuse(self, key: str, value: Any, allowed: str, hint: str = "convert a drafter made so") -> CheckpointError:
        given = "is missing" if value is _MISSING else f"= {value!r}"
        return CheckpointError(f"{self.file}: {key} {given}; allowed: {allowed}; {hint}")

    def value(self, key: str, default: Any = _MISSING) -> Any:
        """One of the drafter's own keys; `default` where it is not said or null."""
        found = self.dflash.get(key, self.values.get(key))
        return default if found is None else found

    def only(self, key: str, allowed: tuple[Any, ...], shown: str, place: Mapping[str, Any] | None = None) -> None:
        value = self.value(key, None) if place is None else place.get(key)
        if value is not None and not any(
            value is one or (type(value) is type(one) and value == one) for one in allowed
        ):
            raise self.refuse(key, value, shown)

    def count(self, key: str, least: int, default: Any = _MISSING) -> int:
        value = self.value(key, default)
        if type(value) is not int or value < least:
            raise self.refuse(key, value, f"numbers from {least}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.value(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, value, "true, false")
        return value

    def kind(self) -> str:
        if self.speculators:
            kind = self.values["speculators_model_type"]
            if kind not in SPECULATORS:
                raise self.refuse("speculators_model_type", kind, ", ".join(SPECULATORS))
            return kind
        named = self.values.get("architectures")
        kinds = [AUTHORS[name] for name in _strings(named) if name in AUTHORS]
        if not kinds:
            raise self.refuse("architectures", named, ", ".join(AUTHORS), "name a DFlash or DSpark drafter")
        return kinds[0]

    def check_target(self, target: Mapping[str, Any]) -> None:
        """Raise unless embeddings and logits are the target's, and the target's are what a drafter takes them for."""
        for key in ("hidden_size", "num_target_layers"):
            theirs = target.get("num_hidden_layers" if key == "num_target_layers" else key)
            self.only(key, (theirs,), f"{theirs}, the target's", self.layer)
        self.only("target_hidden_size", (target["hidden_size"],), f"{target['hidden_size']}, the target's")
        vocabulary = target["vocab_size"]
        if (size := self.layer.get("vocab_size")) is not None and (type(size) is not int or size < vocabulary):
            raise self.refuse("vocab_size", size, f"{vocabulary}, the target's", "name the target it was trained on")
        drafted = self.value("draft_vocab_size", vocabulary)
        if drafted != vocabulary:
            raise self.refuse("draft_vocab_size", drafted, f"{vocabulary}, all ids of the target")
        for key in ("final_logit_softcapping", "logit_scale", "logits_scaling", "embedding_multiplier"):
            if (value := target.get(key)) not in (None, 1, 1.0):
                raise CheckpointError(
                    f"{self.file}: the target's {key} = {value}, which a drafter does not have between its states and "
                    "the target's embeddings or lm_head; allowed: targets without; train a head for this one"
                )
        if str(target.get("model_type")).startswith("gemma"):
            raise CheckpointError(
                f"{self.file}: a target of type {target['model_type']} scales its embeddings; allowed: targets that do "
                "not; train a head for this one"
            )

    def check_layers(self, target: Mapping[str, Any]) -> None:
        """Raise unless the draft layers are Qwen3's with full attention in both directions."""
        layer, unknown = self.layer, sorted(self.dflash.keys() - _DFLASH_KEYS)
        for key in ("hidden_act", "is_neox_style", "attention_bias", "quantization_config"):
            allowed = {"hidden_act": ("silu",), "is_neox_style": (True,), "attention_bias": (False,)}.get(key, ())
            self.only(key, allowed, repr(allowed[0]) if allowed else "none", layer)
        for key in ("is_causal", "causal", "add_swa_attention_sink_bias"):
            self.only(key, (False,), "False")
        self.only("use_aux_hidden_state", (True,), "True")
        self.only("logit_scale", (1, 1.0), "1")
        self.only("quantization_config", (), "none")
        for key in unknown:
            if self.dflash[key] not in (None, False):
                raise self.refuse(f"dflash_config.{key}", self.dflash[key], "none")
        self._check_sliding(target)

    def _check_sliding(self, target: Mapping[str, Any]) -> None:
        """A window that is longer than any text of the target, in both directions, is full attention."""
        types = set(_strings(self.layer.get("layer_types"))) - {"full_attention"}
        if not types:
            return
        window = self.dflash.get("swa_window_size") or self.layer.get("sliding_window")
        longest = target.get("max_position_embeddings")
        both = self.value("sliding_window_non_causal", False) is True or self.dflash.get("causal") is False
        fits = type(window) is int and type(longest) is int and window >= longest
        if types != {"sliding_attention"} or not (fits and both):
            raise self.refuse(
                "layer_types",
                sorted(types),
                f"full_attention, or sliding_attention in both directions over {longest} tokens, all of a text",
            )

    def sizes(self) -> dict[str, Any]:
        """The backbone_... options; numbers of heads are read of the tensors, which say them all."""
        for key in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads"):
            if type(value := self.layer.get(key, _MISSING)) is not int or value < 1:
                raise self.refuse(key, value, "numbers from 1", "copy the checkpoint again")
        rope = self.layer.get("rope_parameters") or {
            **(self.layer.get("rope_scaling") or {}),
            "rope_theta": self.layer.get("rope_theta"),
        }
        if not isinstance(rope, dict) or rope.keys() - _ROPE_KEYS:
            raise self.refuse("rope_parameters", rope, "rope_theta and the default type")
        for key, allowed in (("rope_type", "default"), ("type", "default"), ("partial_rotary_factor", 1)):
            if rope.get(key) not in (None, allowed):
                raise self.refuse(f"rope_parameters.{key}", rope[key], repr(allowed))
        self.only("partial_rotary_factor", (1, 1.0), "1", self.layer)
        theta: Any = rope.get("rope_theta")
        eps: Any = self.layer.get("rms_norm_eps", 1e-6)
        if type(theta) not in (int, float) or theta <= 0:
            raise self.refuse("rope_theta", theta, "a number above 0", "write the one it was trained with")
        if type(eps) not in (int, float):
            raise self.refuse("rms_norm_eps", eps, "a number")
        return {
            "backbone_layers": self.layer["num_hidden_layers"],
            "backbone_heads": self.layer["num_attention_heads"],
            "backbone_kv_heads": self.layer["num_key_value_heads"],
            "backbone_theta": float(theta),
            "backbone_eps": float(eps),
        }

    def layer_ids(self, target: Mapping[str, Any]) -> list[int]:
        """As a head says them: how many layers of the target lie before the state."""
        key, offset = ("aux_hidden_state_layer_ids", 0) if self.speculators else ("target_layer_ids", 1)
        ids, last = self.value(key), target.get("num_hidden_layers", 0) - 1
        if not isinstance(ids, list) or not ids or any(type(i) is not int or not 0 <= i + offset <= last for i in ids):
            raise self.refuse(
                key, ids, f"numbers from {-offset} to {last - offset} of the target's layers", "name its own target"
            )
        return [i + offset for i in ids]

    def proposed(self) -> int | None:
        """Drafts of a step where speculators' config says so."""
        methods = self._section("speculators_config").get("proposal_methods")
        first = methods[0] if isinstance(methods, list) and methods else {}
        drafts = first.get("speculative_tokens") if isinstance(first, dict) else None
        return drafts if type(drafts) is int and drafts >= 1 else None

    def verifier(self) -> str | None:
        verifier = self._section("speculators_config").get("verifier")
        name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
        return name if isinstance(name, str) else None


def _strings(values: Any) -> list[str]:
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []
