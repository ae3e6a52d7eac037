"""Options of `vllm-mtpc convert`, and reading checkpoints and their targets' configs.

Pickled files are read with `torch.load(weights_only=True, mmap=True)` only: no pickled code runs, and the optimiser's
state is not read into memory.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from vllm_mtpc.checkpoint.locate import CONFIG_FILE, HUB_NAME, PICKLE_SUFFIXES, download, verifier_name
from vllm_mtpc.errors import CheckpointError, first_line

SETTINGS_FILE = "config.yaml"  # next to an MtPC checkpoint
_STEP_FILE = re.compile(r"model@(\d+)\.pt")


class ConvertOptions(BaseModel):
    """Options of a conversion. Every field is a flag of `vllm-mtpc convert`, except `ckpt`, its argument."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ckpt: Path = Field(
        description="MtPC: model@STEP.pt with config.yaml next to it, or the folder of both (the last step is used); "
        "DFlash, DSpark, EAGLE-3: folder or hub repository; the target again: its own prediction heads"
    )
    target: str = Field(min_length=1, description="the model it was trained on: folder or hub name")
    out: Path = Field(description="folder of the head")

    @property
    def verifier(self) -> str:
        """The target's name in the head."""
        return verifier_name(self.target, self.out)


def find_checkpoint(ckpt: Path) -> tuple[Path, str]:
    """Return a checkpoint's file, or a drafter's folder, downloaded if need be, and its name for provenance."""
    if ckpt.is_file():
        return ckpt, ckpt.name
    if not ckpt.is_dir() and HUB_NAME.fullmatch(str(ckpt)) and ckpt.suffix not in PICKLE_SUFFIXES:
        folder = download(str(ckpt), "checkpoint")
        return folder, f"{ckpt}@{folder.name}"  # the hub's cache names folders by commit
    steps = {int(match[1]): file for file in ckpt.glob("model@*.pt") if (match := _STEP_FILE.fullmatch(file.name))}
    if not steps and not (ckpt / CONFIG_FILE).exists():
        raise CheckpointError(
            f"{ckpt}: no checkpoint; name a model@STEP.pt or its folder, a drafter's folder or repository"
        )
    return (steps[max(steps)], steps[max(steps)].name) if steps else (ckpt, ckpt.resolve().name)


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
