"""Ways of decoding that `vllm-mtpc bench serve` puts side by side, and what keeps one from being run."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vllm_mtpc.errors import UsageError

LOOKUP = {"prompt_lookup_max": 5, "prompt_lookup_min": 2}  # of ngram: the most tokens/step on the demo of those tried
DRAFTS = 5  # of peers, where no number is given
INTERPRETER = Path(__file__).parents[2] / "scripts" / "interpreter"
INTERPRETED = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1", "PYTHONPATH": str(INTERPRETER)}
OWN = "own runner"
V2_INTERPRETED = "V2, interpreted"


@dataclass(frozen=True, eq=False)
class Decoding:
    """One way of decoding. ``group``: it is compared with plain vLLM of the same group alone."""

    name: str
    speculative: dict[str, Any] | None = None  # vLLM's speculative_config; None: plain
    circuit: str | None = None  # of an MtPC head
    group: str = OWN

    @property
    def is_plain(self) -> bool:
        return self.speculative is None

    @property
    def is_ours(self) -> bool:
        return (self.speculative or {}).get("method") in ("mtpc", "ptp")

    @property
    def environment(self) -> dict[str, str]:
        """What its engine's process needs besides what every engine gets."""
        return INTERPRETED if self.group == V2_INTERPRETED else {}


class Missing(NamedTuple):
    """A row that was not run."""

    name: str
    reason: str


def plain(group: str = OWN) -> Decoding:
    return Decoding("plain", group=group)


def peers(
    names: Sequence[str], num_drafts: int | None, eagle: str | None, draft_model: str | None
) -> tuple[list[Decoding], list[Missing]]:
    """Peers by name (ngram, suffix), and those that a checkpoint is given for."""
    count = num_drafts or DRAFTS
    found, missing = [], []
    if "ngram" in names:
        found.append(Decoding("ngram", {"method": "ngram", "num_speculative_tokens": count, **LOOKUP}))
    if "suffix" in names:
        if importlib.util.find_spec("arctic_inference") is None:
            missing.append(Missing("suffix", "arctic-inference is not installed"))
        else:
            found.append(Decoding("suffix", {"method": "suffix"}))
    if eagle:
        found.append(Decoding("EAGLE", {"model": eagle, "num_speculative_tokens": count}))
    if draft_model:
        own = {"method": "draft_model", "model": draft_model, "num_speculative_tokens": count}
        found.append(Decoding("draft model", own))
    return found, missing


def heads(
    names: Sequence[str], variants: dict[str, dict[str, Any]], num_drafts: int | None, on_gpu: bool
) -> tuple[list[Decoding], list[Missing]]:
    """Heads of this package by folder or hub name, each as it is and once more for every variant.

    A variant has a name and more of the speculative_config.

    PTP heads and draft layers need Model Runner V2: without a GPU its kernels are interpreted, in a group of their own.
    """
    from vllm_mtpc.eval.loading import resolve

    configs = [(name, resolve(name)[1]) for name in names]
    found, missing = [], []
    for label, (name, config) in zip(_labels(configs), configs, strict=True):
        given = {"method": config.speculators_model_type, "model": name}
        if num_drafts:
            given["num_speculative_tokens"] = num_drafts
        circuit = getattr(config, "circuit", None)
        needs_v2 = circuit is None or config.lora_layers > 0
        group = V2_INTERPRETED if needs_v2 and not on_gpu else OWN
        if group == V2_INTERPRETED and not INTERPRETER.is_dir():
            what = "draft layers need" if circuit else "PTP heads need"
            missing.append(Missing(label, f"{what} a GPU, or scripts/interpreter of this package's checkout"))
            continue
        found.append(Decoding(label, given, circuit, group))
        found += [Decoding(f"{label}, {key}", {**given, **more}, circuit, group) for key, more in variants.items()]
    return found, missing


def _labels(configs: Sequence[tuple[str, Any]]) -> list[str]:
    """A name for each head, no two the same: its circuit or variant; with sizes, then the folder, where need be.

    An FF head predicts the tokens of a window independently of each other, as Medusa's heads do.
    """

    def circuit(config: Any) -> str:
        return getattr(config, "circuit", None) or config.variant

    def sizes(config: Any) -> str:
        components = getattr(config, "num_components", None)
        return f"n={config.window}" + (f" r={components}" if components else "")

    medusa = " (Medusa-style)"
    tries = (
        lambda name, config: circuit(config) + (medusa if circuit(config) == "ff" else ""),
        lambda name, config: f"{circuit(config)} {sizes(config)}",
        lambda name, config: f"{circuit(config)} {Path(name).name}",
    )
    for label in tries:
        labels = [label(name, config) for name, config in configs]
        if len(set(labels)) == len(labels):
            return labels
    raise UsageError("the same head is named twice; name each head once")
