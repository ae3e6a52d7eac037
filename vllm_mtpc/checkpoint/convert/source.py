"""Options of `vllm-mtpc convert`, and reading checkpoints and their targets' configs.

Pickled files are read with `torch.load(weights_only=True, mmap=True)` only: no pickled code runs, and the optimiser's
state is not read into memory.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from vllm_mtpc.checkpoint.locate import CONFIG_FILE, HUB_NAME, PICKLE_SUFFIXES, verifier_name
from vllm_mtpc.errors import CheckpointError, first_line

if TYPE_CHECKING:
    from torch import Tensor

SETTINGS_FILE = "config.yaml"  # next to an MtPC checkpoint
_ADAPTER = re.compile(r"base_model\.model\..*\.lora_[AB](?=(\.default)?\.weight$)")
_STEP_FILE = re.compile(r"model@(\d+)\.pt")


class ConvertOptions(BaseModel):
    """Options of a conversion. Every field is a flag of `vllm-mtpc convert`, except `ckpt`, its argument."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ckpt: Path = Field(
        description="PTP: Lightning checkpoint (.ckpt); MtPC: model@STEP.pt with config.yaml next to it, the folder of "
        "both (the last step is used) or a hub repository; DFlash, DSpark, EAGLE-3: folder or hub repository; the "
        "target again: its own prediction heads"
    )
    target: str = Field(min_length=1, description="the model it was trained on: folder or hub name")
    out: Path = Field(description="folder of the head")
    temperature: float = Field(1.0, gt=0, description="temperature of the text (PTP: of u's picks) it was trained on")
    top_k: int = Field(0, ge=0, description="top-k of that text; 0: off")
    top_p: float = Field(1.0, gt=0, le=1, description="top-p of that text; 1: off")
    variant: Literal["o-ptp", "c-ptp"] = Field("o-ptp", description="PTP: variant of the rows")
    window: int = Field(16, ge=2, description="PTP: n, auxiliary rows, as many as it was trained with")
    lora_alpha: float = Field(8.0, gt=0, description="PTP: of the adapters (PEFT's default, which the authors use)")

    def config_fields(self, target: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of `AnyHeadConfig.create` that follow from the options and the target's config."""
        sampling = {f"trained_{name}": getattr(self, name) for name in ("temperature", "top_k", "top_p")}
        return {"target": target, "verifier": verifier_name(self.target, self.out), **sampling}


def find_checkpoint(ckpt: Path) -> tuple[Path, str]:
    """Return a checkpoint's file, or a drafter's folder, downloaded if need be, and its name for provenance."""
    if ckpt.is_file():
        return ckpt, ckpt.name
    if ckpt.is_dir():
        name = _last_step(str(ckpt), os.listdir(ckpt))
        return (ckpt / name, name) if name else (ckpt, ckpt.resolve().name)
    if not HUB_NAME.fullmatch(str(ckpt)) or ckpt.suffix in PICKLE_SUFFIXES:
        raise CheckpointError(
            f"{ckpt} is not a file; name a .ckpt, a model@STEP.pt or its folder, a drafter or hub repository"
        )
    repo = str(ckpt)
    try:
        from huggingface_hub import HfApi, snapshot_download

        info = HfApi().model_info(repo)
        name = _last_step(repo, [sibling.rfilename for sibling in info.siblings or []])
        drafter = [CONFIG_FILE, "*.safetensors", "*.safetensors.index.json"]
        files = [name, SETTINGS_FILE] if name else drafter
        folder = Path(snapshot_download(repo, revision=info.sha, allow_patterns=files))
    except CheckpointError:
        raise
    except Exception as error:  # the hub client raises many types
        raise CheckpointError(
            f"{repo}: not a local file or folder, and cannot be downloaded ({first_line(error)}); correct the name"
        ) from None
    return (folder / name, f"{repo}@{info.sha}/{name}") if name else (folder, f"{repo}@{info.sha}")


def _last_step(place: str, names: Iterable[str]) -> str | None:
    steps = {int(match[1]): name for name in names if (match := _STEP_FILE.fullmatch(name))}
    if not steps and CONFIG_FILE not in names:
        raise CheckpointError(
            f"{place}: has no model@STEP.pt and no {CONFIG_FILE}; name a checkpoint's file, folder or repository"
        )
    return steps[max(steps)] if steps else None


def load_tensors(path: Path) -> Any:
    """Load a file of `torch.save` that holds tensors and plain values only, memory-mapped; raises CheckpointError."""
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises many types
        raise CheckpointError(
            f"{path}: cannot be read as tensors alone ({first_line(error)}); other pickled objects are never loaded: "
            "if you trust the file, load it, save its state dict again with torch.save and convert that"
        ) from None


def to_peft_names(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return LoRA tensors by PEFT's names on disk; raises CheckpointError for any other tensor."""
    found = {}
    for name, value in tensors.items():
        if (match := _ADAPTER.search(name)) is None:
            raise CheckpointError(f"{path}: {name} is not supported; allowed: lora_A, lora_B of linear layers")
        found[f"{match[0]}.weight"] = value
    return found


def target_config(name: str) -> dict[str, Any]:
    """Return the config of a target's language model, which transformers need not know; raises CheckpointError."""
    from transformers import AutoConfig, PretrainedConfig

    try:  # trust_remote_code=False: a model with its own code is an error, not a question on the terminal
        return AutoConfig.from_pretrained(name, trust_remote_code=False).get_text_config().to_dict()
    except (OSError, ValueError, KeyError) as error:  # transformers raises all of these on bad input
        reason = first_line(error)
    with contextlib.suppress(OSError, ValueError):
        values, _ = PretrainedConfig.get_config_dict(name)
        values = values.get("text_config", values)
        if {"vocab_size", "hidden_size"} <= values.keys():
            return values
    raise CheckpointError(
        f"target {name}: no config that transformers can read ({reason}); name the folder or hub repository of the "
        "model the checkpoint was trained on"
    )
