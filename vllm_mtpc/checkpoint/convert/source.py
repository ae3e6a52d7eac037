"""What `vllm-mtpc convert` is asked, and what it reads: a checkpoint's file, and the config of its target.

Pickled files are read with `torch.load(weights_only=True, mmap=True)` and nothing else: no pickled object is ever run,
and of a file that also holds an optimiser's state only the tensors that are used are read.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from vllm_mtpc.checkpoint.locate import CONFIG_FILE, HUB_NAME, PICKLE_SUFFIXES
from vllm_mtpc.errors import CheckpointError, first_line

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SETTINGS_FILE = "config.yaml"  # next to an MtPC checkpoint
MASK_FILE = "mask_embedding.pt"  # next to a drafter, of a mask that was trained apart
SHARED = ("ckpt", "target", "out", "temperature", "top_k", "top_p")  # what heads other than PTP's do not say themselves
_ADAPTER = re.compile(r"base_model\.model\..*\.lora_[AB](?=(\.default)?\.weight$)")
_STEP_FILE = re.compile(r"model@(\d+)\.pt")


class ConvertOptions(BaseModel):
    """What is to be converted. A field is a flag of `vllm-mtpc convert`, ckpt its argument."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ckpt: Path = Field(
        description="PTP: Lightning checkpoint (.ckpt); MtPC: model@STEP.pt with config.yaml next to it, the folder of "
        "both (the last step is taken) or a hub repository; DFlash, DSpark: folder or hub repository"
    )
    target: str = Field(min_length=1, description="the model it was trained on: folder or hub name")
    out: Path = Field(description="folder of the head")
    temperature: float = Field(1.0, gt=0, description="temperature of the text (PTP: of u's picks) it was trained on")
    top_k: int = Field(0, ge=0, description="top-k of that text; 0: off")
    top_p: float = Field(1.0, gt=0, le=1, description="top-p of that text; 1: off")
    layout: Literal["auto", "official", "fork"] = Field("auto", description="PTP: names in the file")
    variant: Literal["o-ptp", "c-ptp"] = Field("o-ptp", description="PTP: what the rows were trained to give")
    window: int | None = Field(
        None, ge=2, description="PTP: n, auxiliary rows (default: as the histogram's, or 16, what the authors train)"
    )
    u_embedding: str | None = Field(None, description="PTP: name of the u-embedding, where its tensors fit several")
    lora_alpha: float = Field(8.0, gt=0, description="PTP: of the adapters; PEFT's default, which the authors leave")
    histogram: Path | None = Field(None, description="PTP: correct_count_hist.pt, shares of 0, 1, ... correct tokens")

    @property
    def trained_sampling(self) -> dict[str, Any]:
        """As a head's config says it."""
        return {f"trained_{name}": getattr(self, name) for name in ("temperature", "top_k", "top_p")}


def locate(ckpt: Path) -> tuple[Path, str]:
    """The checkpoint named by a file, a folder of model@STEP.pt files (the last step) or a hub repository of them.

    Of a DFlash or DSpark drafter, which has config.json and no such files, the folder. And what provenance calls it: a
    file's or folder's name, or repository@commit with the file. Raises CheckpointError when there is none.
    """
    if ckpt.is_file():
        return ckpt, ckpt.name
    if ckpt.is_dir():
        name = _last_step(str(ckpt), os.listdir(ckpt))
        return (ckpt / name, name) if name else (ckpt, ckpt.resolve().name)
    if HUB_NAME.fullmatch(str(ckpt)) and ckpt.suffix not in PICKLE_SUFFIXES:
        return _download(str(ckpt))
    raise CheckpointError(
        f"{ckpt} is not a file; name a Lightning checkpoint (.ckpt), a model@STEP.pt or its folder, a drafter's folder "
        "or a hub repository"
    )


def load(path: Path) -> Any:
    """What torch.save wrote to `path`, tensors alone, memory-mapped; raises CheckpointError."""
    import torch

    if not path.is_file():
        raise CheckpointError(f"{path} is not a file; name a Lightning checkpoint (.ckpt) or histogram (.pt)")
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises many kinds; a user needs one line whatever is wrong with the file
        raise CheckpointError(
            f"{path}: cannot be read as tensors alone ({first_line(error)}); other pickled objects are never loaded: "
            "where you trust the file, load it, save its state dict again with torch.save and convert that"
        ) from None


def adapters_of(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Adapters by PEFT's names on disk; raises CheckpointError for what is none."""
    found = {}
    for name, value in tensors.items():
        if (match := _ADAPTER.search(name)) is None:
            raise CheckpointError(f"{path}: {name} is no adapter heads have; allowed: lora_A, lora_B of linear layers")
        found[f"{match[0]}.weight"] = value
    return found


def target_config(name: str) -> dict[str, Any]:
    """The config of a target's language model, no weights read; raises CheckpointError.

    Of a model that transformers does not know (EvaByte, Byte-Llama) its config.json is taken as it is.
    """
    from transformers import AutoConfig, PretrainedConfig

    try:  # False: a model with code of its own is an error, not a question on the terminal
        return AutoConfig.from_pretrained(name, trust_remote_code=False).get_text_config().to_dict()
    except (OSError, ValueError, KeyError) as error:  # transformers raises all of these on bad input
        values, reason = {}, first_line(error)
    with contextlib.suppress(OSError, ValueError):
        values, _ = PretrainedConfig.get_config_dict(name)
    values = values.get("text_config", values)
    if not {"vocab_size", "hidden_size"} <= values.keys():
        raise CheckpointError(
            f"target {name}: no config that transformers can read ({reason}); name the folder or hub repository of the "
            "model the checkpoint was trained on"
        )
    return values


def narrowest(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """The narrowest type of a head that holds every tensor exactly (float64: rounded to float32)."""
    import torch

    dtype = functools.reduce(torch.promote_types, {tensor.dtype for tensor in tensors.values()})
    return dtype if dtype in (torch.float16, torch.bfloat16) else torch.float32


def _last_step(place: str, names: Iterable[str]) -> str | None:
    """The file of the last step; None where there is none, but a drafter's config. Raises CheckpointError."""
    steps = {int(match[1]): name for name in names if (match := _STEP_FILE.fullmatch(name))}
    if not steps and CONFIG_FILE not in names:
        raise CheckpointError(
            f"{place}: has no model@STEP.pt and no {CONFIG_FILE}; name a checkpoint's file, folder or repository"
        )
    return steps[max(steps)] if steps else None


def _download(repo: str) -> tuple[Path, str]:
    try:
        from huggingface_hub import HfApi, hf_hub_download, snapshot_download

        info = HfApi().model_info(repo)
        name = _last_step(repo, [sibling.rfilename for sibling in info.siblings or []])
        if name is None:
            patterns = [CONFIG_FILE, "*.safetensors", "*.safetensors.index.json", MASK_FILE]
            folder = snapshot_download(repo, revision=info.sha, allow_patterns=patterns)
            return Path(folder), f"{repo}@{info.sha}"
        hf_hub_download(repo, SETTINGS_FILE, revision=info.sha)
        return Path(hf_hub_download(repo, name, revision=info.sha)), f"{repo}@{info.sha}/{name}"
    except CheckpointError:
        raise
    except Exception as error:  # the hub client raises many kinds; a user needs one line whatever happened
        raise CheckpointError(
            f"{repo}: not a file or folder here, and not to be had from the hub ({first_line(error)}); correct its "
            f"name, or download its files, of MtPC a model@STEP.pt and {SETTINGS_FILE} into one folder, and name that"
        ) from None
