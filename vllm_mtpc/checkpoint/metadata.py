"""The YAML front matter of a head's model card, and the measured acceptance in its provenance.

Unknown keys are left out: the licence if the target's card has none, the target if it is a folder, numbers that were
not measured.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from huggingface_hub import EvalResult, ModelCardData, hf_hub_download
from huggingface_hub.repocard import metadata_load
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_mtpc.checkpoint.locate import HUB_NAME, PROVENANCE_FILE
from vllm_mtpc.errors import CheckpointError
from vllm_mtpc.files import read_json

LICENSE_KEYS = ("license", "license_name", "license_link")  # the last two where the first is "other"
TASK = "text-generation"
PLOTS = {
    "loss.png": "Loss and expected tokens/step over the run",
    "acceptance.png": "Acceptance and tokens/step per position",
}  # figures in the card, by file of the folder


class Figures(BaseModel):
    """Results at one temperature, as far as other modules read them."""

    model_config = ConfigDict(strict=True)

    tokens_per_step: float
    standard_error: float
    per_position: list[Annotated[float, Field(ge=0, le=1)]] = Field(min_length=1)  # P(drafts 1 .. k are accepted)


def card_data(
    tags: list[str],
    base_model: str | None,
    license: Mapping[str, Any] | None = None,
    results: Sequence[EvalResult] = (),
    name: str = "",
) -> ModelCardData:
    """Return the metadata of a head's card; `name` is the model name of `results`."""
    given: dict[str, Any] = {**(license or {})}
    given |= {"model_name": name, "eval_results": list(results)} if results else {}
    return ModelCardData(library_name="vllm", pipeline_tag=TASK, tags=tags, base_model=base_model, **given)


def eval_results(tokens_per_step: Mapping[str, float], texts: Sequence[str]) -> list[EvalResult]:
    """Return card entries of tokens/step by temperature ("T=1", "T=0"), measured on data sets or files `texts`."""
    named = ", ".join(texts)
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


def read_figures(folder: Path) -> dict[str, Figures]:
    """Return the results in a head's provenance by "t1" and "t0"; empty if it has none, or if one is not possible."""
    try:
        figures = read_json(folder / PROVENANCE_FILE)["figures"]
        return {key: Figures.model_validate(figures[key]) for key in ("t1", "t0") if key in figures}
    except (CheckpointError, KeyError, TypeError, ValidationError):
        return {}


def target_license(target: str) -> dict[str, Any]:
    """Return those of LICENSE_KEYS that the card of a target has, in its folder or the hub's cache; empty: none."""
    found = _metadata(target)
    known = found.get("license") not in (None, "unknown")
    return {key: found[key] for key in LICENSE_KEYS if key in found} if known else {}


def _metadata(target: str) -> dict[str, Any]:
    try:
        in_folder = os.path.isdir(target)
        card = Path(target, "README.md") if in_folder else hf_hub_download(target, "README.md", local_files_only=True)
        return metadata_load(card) or {}
    except Exception:  # the hub client and YAML raise many types; a head needs no card of its target
        return {}


def weights_of(target: str) -> str:
    """Return what the card in a target's folder says of its weights, as "ORG/NAME, quantized"; empty: nothing."""
    found = _metadata(target) if os.path.isdir(target) else {}
    parts = [found.get(key) for key in ("base_model", "base_model_relation")]
    return ", ".join(part for part in parts if isinstance(part, str))
