"""The YAML in front of a head's card, as the hub reads it.

What is not known is left out: the licence where the target's card names none, the target where it is a folder,
the measured numbers where nothing was measured. `vllm-mtpc push` fills in what it can.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.repocard import metadata_load

from vllm_mtpc.checkpoint.locate import HUB_NAME, hub_name
from vllm_mtpc.config.base import AnyHeadConfig

LICENSE_KEYS = ("license", "license_name", "license_link")  # the last two where the first is "other"
TASK = "text-generation"
PLOTS = {
    "loss.png": "Loss and expected tokens/step over the run",
    "acceptance.png": "Acceptance and tokens/step per position",
    "frontier.png": "Tokens/step over the latency of a step",
}  # figures in the card, by file of the folder


def card_data(
    tags: Sequence[str],
    base_model: str | None,
    license: Mapping[str, Any] | None = None,
    results: Sequence[EvalResult] = (),
    name: str = "",
) -> ModelCardData:
    """What the hub reads of a head; `name` is the model's that `results` are listed under."""
    measured: dict[str, Any] = {"model_name": name, "eval_results": list(results)} if results else {}
    return ModelCardData(
        library_name="vllm",
        pipeline_tag=TASK,
        tags=list(tags),
        base_model=base_model,
        **(license or {}),
        **measured,
    )


def front_matter(data: ModelCardData) -> str:
    return f"---\n{data.to_yaml()}\n---"


def eval_results(tokens_per_step: Mapping[str, float], texts: Sequence[str]) -> list[EvalResult]:
    """Measured tokens/step by temperature ("T=1", "T=0"), on the data sets or files `texts`."""
    named = ", ".join(texts) or "held-out text"
    on_hub = len(texts) == 1 and HUB_NAME.fullmatch(texts[0]) and not os.path.exists(texts[0])
    return [
        EvalResult(
            task_type=TASK,
            dataset_type=texts[0] if on_hub else "text",
            dataset_name=named,
            metric_type="tokens_per_step",
            metric_name=f"Tokens/step at {temperature}",
            metric_value=round(value, 3),
        )
        for temperature, value in tokens_per_step.items()
    ]


def measured_on(record: Mapping[str, Any]) -> list[str]:
    """The text that a head was measured on, of its provenance: held-out data, else a share of what it learned from."""
    settings, data = record.get("settings"), record.get("data")
    held_out = settings.get("validation_data") if isinstance(settings, dict) else None
    names = held_out or (data.get("names") if isinstance(data, dict) else None)
    return [str(name) for name in names] if isinstance(names, list) else []


def license_of(card: Path) -> dict[str, Any]:
    """The licence that a card names: LICENSE_KEYS it has; empty where it has none, or there is no card to be read."""
    try:
        found = metadata_load(card) or {}
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    known = found.get("license") not in (None, "unknown")
    return {key: found[key] for key in LICENSE_KEYS if key in found} if known else {}


def target_license(target: str, is_online: bool = False) -> dict[str, Any]:
    """As license_of, of a target's own card: in its folder, or on the hub; offline, what the hub's cache has of it."""
    if os.path.isdir(target):
        return license_of(Path(target) / "README.md")
    from huggingface_hub import hf_hub_download

    try:
        return license_of(Path(hf_hub_download(target, "README.md", local_files_only=not is_online)))
    except Exception:  # the hub's client raises many kinds, and a head is trained and published without it
        return {}


def converted_card(config: AnyHeadConfig, title: str, about: str) -> str:
    """README.md of a head that was not trained here."""
    data = card_data(tags_of(config), hub_name(config.speculators_config.verifier.name_or_path))
    return f"{front_matter(data)}\n\n# {title}\n\n{about} The output is the target's own, whatever the head drafts.\n"


def tags_of(config: AnyHeadConfig) -> list[str]:
    return list(dict.fromkeys(["mtpc", config.speculators_model_type, "speculative-decoding"]))
