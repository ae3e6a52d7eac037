"""What `vllm-mtpc convert` reads: a checkpoint's file, found or downloaded, and the config of its target.

Files are read with `torch.load(weights_only=True, mmap=True)` and nothing else: no pickled object is ever run, and of a
file that also holds an optimiser's state only the tensors that are used are read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from vllm_mtpc.checkpoint.locate import PICKLE_SUFFIXES
from vllm_mtpc.errors import CheckpointError, first_line

SETTINGS_FILE = "config.yaml"  # beside an MtPC checkpoint
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_STEP_FILE = re.compile(r"model@(\d+)\.pt")


class Source(NamedTuple):
    """A checkpoint on this machine."""

    file: Path
    label: str  # what provenance calls it: a file's name, or repository@commit/file


def locate(ckpt: Path) -> Source:
    """The checkpoint named by a file, a folder of model@STEP.pt files (the last step) or a hub repository of them.

    Raises CheckpointError when there is none.
    """
    if ckpt.is_file():
        return Source(ckpt, ckpt.name)
    if ckpt.is_dir():
        name = _last_step(str(ckpt), os.listdir(ckpt))
        return Source(ckpt / name, name)
    if _HUB_NAME.fullmatch(str(ckpt)) and ckpt.suffix not in PICKLE_SUFFIXES:
        return _download(str(ckpt))
    raise CheckpointError(
        f"{ckpt} is not a file; name a Lightning checkpoint (.ckpt), a model@STEP.pt or its folder, or a hub repository"
    )


def load(path: Path) -> Any:
    """What torch.save wrote to `path`, tensors alone, memory-mapped; raises CheckpointError."""
    import torch

    if not path.is_file():
        raise CheckpointError(f"{path} is not a file; name a Lightning checkpoint (.ckpt) or histogram (.pt)")
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises many kinds; a user needs one line whatever is wrong with the file
        reason = first_line(error)
        raise CheckpointError(
            f"{path}: cannot be read as tensors alone ({reason}); other pickled objects are never loaded: where you "
            "trust the file, load it, save its state dict again with torch.save and convert that"
        ) from None


def target_config(name: str) -> Any:
    """The config of a target's language model, no weights read; raises CheckpointError."""
    from transformers import AutoConfig

    try:  # False: a model with code of its own is an error, not a question on the terminal
        return AutoConfig.from_pretrained(name, trust_remote_code=False).get_text_config()
    except (OSError, ValueError, KeyError) as error:  # transformers raises all of these on bad input
        reason = first_line(error)
        raise CheckpointError(
            f"target {name}: no config that transformers can read ({reason}); name the folder or hub repository of the "
            "model the checkpoint was trained on"
        ) from None


def target_values(name: str) -> dict[str, Any]:
    """As target_config, as a dict, and also of a model that transformers does not know (EvaByte, Byte-Llama)."""
    from transformers import PretrainedConfig

    try:
        return target_config(name).to_dict()
    except CheckpointError:
        try:
            values, _ = PretrainedConfig.get_config_dict(name)
        except (OSError, ValueError):
            values = {}
        values = values.get("text_config", values)
        if not {"vocab_size", "hidden_size"} <= values.keys():
            raise
        return values


def _last_step(place: str, names: Iterable[str]) -> str:
    steps = {int(match[1]): name for name in names if (match := _STEP_FILE.fullmatch(name))}
    if not steps:
        raise CheckpointError(f"{place}: has no model@STEP.pt; name a checkpoint's file, its folder or its repository")
    return steps[max(steps)]


def _download(repo: str) -> Source:
    try:
        from huggingface_hub import HfApi, hf_hub_download

        info = HfApi().model_info(repo)
        name = _last_step(repo, [sibling.rfilename for sibling in info.siblings or []])
        hf_hub_download(repo, SETTINGS_FILE, revision=info.sha)
        return Source(Path(hf_hub_download(repo, name, revision=info.sha)), f"{repo}@{info.sha}/{name}")
    except CheckpointError:
        raise
    except Exception as error:  # the hub client raises many kinds; a user needs one line whatever happened
        reason = first_line(error)
        raise CheckpointError(
            f"{repo}: not a file or folder here, and not to be had from the hub ({reason}); correct its name, or "
            f"download its model@STEP.pt and {SETTINGS_FILE} into one folder and name that"
        ) from None
