"""Locate heads and their targets: folders, heads bundled in a target's folder, and hub repositories."""

from __future__ import annotations

import os
import re
from pathlib import Path

from vllm_mtpc.errors import CheckpointError, first_line
from vllm_mtpc.families import FAMILIES
from vllm_mtpc.files import read_json

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
U_EMBED_FILE = "u_embed.safetensors"  # of a PTP head, instead of WEIGHTS_FILE
PROVENANCE_FILE = "provenance.json"
PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_TARGET_NAME = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")  # some have no owner: gpt2


def head_method(folder: Path) -> str | None:
    """Return the key of FAMILIES in a folder's `config.json`, None if it is no head of this package."""
    try:
        method = read_json(folder / CONFIG_FILE).get("speculators_model_type")
    except CheckpointError:
        return None
    return method if isinstance(method, str) and method in FAMILIES else None


def is_head(folder: Path) -> bool:
    """Return whether a folder's `config.json` is that of a head of this package."""
    return head_method(folder) is not None


def require_weights(folder: Path, name: str) -> Path:
    """Return the path of the weight file `name` of a head. Raises CheckpointError if it is missing."""
    if (folder / name).is_file():
        return folder / name
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
    found = f" (found {', '.join(pickled)}: pickled weights are never loaded)" if pickled else ""
    save = "save_ptp" if name == U_EMBED_FILE else "save_head"
    raise CheckpointError(f"{folder} has no {name}{found}; save the head with vllm_mtpc.checkpoint.{save}")


def find_head(path: str | Path) -> Path | None:
    """Return the head at `path`, or the first of its `bundled_heads`; None without either."""
    folder = Path(os.path.expanduser(path))
    return next((place for place in (folder, *bundled_heads(folder)) if is_head(place)), None)


def bundled_heads(target: Path) -> list[Path]:
    """Return a target's `mtpc/`, `mtpc/default/` and `mtpc/NAME/` by name that have a config; the first is served."""
    place = target / "mtpc"
    if not os.path.isdir(place):
        return []
    named = sorted(place.iterdir(), key=lambda path: (path.name != "default", path.name))
    return [folder for folder in (place, *named) if (folder / CONFIG_FILE).is_file()]


def resolve_head(model: str, revision: str | None = None) -> Path:
    """Return the local folder of a head. A folder without a head is returned as it is; reading it raises the error.

    Args:
        model: A head folder, a target's folder with a bundled head, or a hub repository, which is downloaded.
        revision: Of the repository.

    Raises:
        CheckpointError: `model` does not exist, is a file, or cannot be downloaded.
    """
    path = Path(os.path.expanduser(model))
    if os.path.isfile(path):  # os.path: False, not an error, for names that no file system takes
        reason = f"it is a file, a head is a folder with {CONFIG_FILE} and {WEIGHTS_FILE}, never pickled weights"
        raise CheckpointError(f"no head at {model}: {reason}; correct the path of the head")
    if not os.path.isdir(path):
        if not HUB_NAME.fullmatch(model):
            raise CheckpointError(f"no head at {model}: the folder does not exist; correct the path of the head")
        path = download(model, "head", revision)
    return find_head(path) or path


def download(repo: str, kind: str, revision: str | None = None) -> Path:
    """Download a "head" or "target" (`kind`) from the hub; returns the local folder. Raises CheckpointError."""
    try:
        from huggingface_hub import snapshot_download

        patterns = ["*.json", "*.safetensors", "README.md"]
        return Path(snapshot_download(repo, revision=revision, allow_patterns=patterns))
    except Exception as error:  # the hub client raises many types
        raise CheckpointError(
            f"no {kind} at {repo!r}: not a local folder, and the hub gave no such repository ({first_line(error)}); "
            f"correct the name of the {kind} or download it first"
        ) from None


def check_out(folder: Path) -> None:
    """Raise CheckpointError if saving a head in `folder` would overwrite the config of another model."""
    if folder.joinpath(CONFIG_FILE).is_file() and not is_head(folder):
        raise CheckpointError(f"out={folder} holds another model's {CONFIG_FILE}; name another folder")


def verifier_name(target: str, out: Path) -> str:
    """Return the target's name for the config of the head in `out`: a relative path of a folder, or the hub name."""
    if not os.path.isdir(target):
        return target
    path = os.path.relpath(target, out)
    return path if path.startswith(".") else f"./{path}"  # without a dot it would be a hub name


def hub_name(name: str) -> str | None:
    """Return `name` if it is a hub name, None for a path."""
    return name if _TARGET_NAME.fullmatch(name) else None


def resolve_verifier(folder: Path, name: str) -> str:
    """Return the target that the config of the head in `folder` names, for vLLM: a folder that exists, or a hub name.

    Raises:
        CheckpointError: The folder does not exist, is outside of the head's repository, or has the form of a hub name.
    """
    path = os.path.realpath(folder / name)
    given = f"{folder}: its {CONFIG_FILE} names the target {name!r}"
    if hub_name(name):
        if os.path.lexists(folder / name):
            remedy = f"write './{name}' if it is the target, else delete the folder"
            raise CheckpointError(f"{given}, a name on the hub, and a folder of that name is in the head; {remedy}")
        return name
    chosen = f'{{"method": "{head_method(folder) or next(iter(FAMILIES))}", "model": "{folder}"}}'
    remedy = f"type vllm serve TARGET --speculative-config '{chosen}'; vllm-mtpc's commands take --target TARGET"
    root = re.match(r".*/models--[^/]+/snapshots/[^/]+", os.path.realpath(folder))  # in the hub's cache
    if root and os.path.commonpath((root[0], path)) != root[0]:
        raise CheckpointError(f"{given}, which is outside of its repository on the hub; {remedy}")
    if not os.path.isdir(path):
        raise CheckpointError(f"{given}, and no folder {path} exists; copy the target there or {remedy}")
    return path
