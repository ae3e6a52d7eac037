"""Where a head is: a folder, a folder shipped inside a target, or a repository on the hub."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from vllm_mtpc import METHODS
from vllm_mtpc.errors import CheckpointError

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
U_EMBED_FILE = "u_embed.safetensors"  # of a PTP head, in the place of WEIGHTS_FILE
PROVENANCE_FILE = "provenance.json"
SHIPPED_FOLDER = "mtpc"  # inside a target's folder
DEFAULT_HEAD = "default"  # of several heads in there
PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def head_method(folder: Path) -> str | None:
    """Which of METHODS the head in a folder is served with, as its config.json says; None for no head of ours."""
    try:
        values = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    method = values.get("speculators_model_type") if isinstance(values, dict) else None
    return method if method in METHODS else None


def is_head(folder: Path) -> bool:
    """Whether a folder's config.json calls itself a head of this package."""
    return head_method(folder) is not None


def holds(folder: Path, name: str) -> bool:
    """Whether a head's folder has the file `name`; raises CheckpointError where the user may not look."""
    try:
        return (folder / name).is_file()
    except PermissionError:
        raise CheckpointError(
            f"{folder}: permission denied; its owner lets you read it with: chmod -R a+rX {folder}"
        ) from None


def require_weights(folder: Path, name: str) -> Path:
    """The weight file `name` of a head; raises CheckpointError where it is missing."""
    if holds(folder, name):
        return folder / name
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
    found = f" (found {', '.join(pickled)}: pickled weights are never loaded)" if pickled else ""
    save = "save_ptp" if name == U_EMBED_FILE else "save_head"
    raise CheckpointError(f"{folder} has no {name}{found}; save the head with vllm_mtpc.checkpoint.{save}")


def find_head(path: str | Path) -> Path | None:
    """The head at `path`, or the first of `shipped_heads`; None where there is none."""
    folder = _local(path)
    return next((place for place in (folder, *shipped_heads(folder)) if is_head(place)), None)


def shipped_heads(target: Path) -> list[Path]:
    """Folders of a target that hold a config of a head, readable or not, the one to be served first.

    That is `mtpc/`, else `mtpc/default/`, else the first of `mtpc/NAME/`. Without `mtpc/` all this costs is a look.
    """
    place = target / SHIPPED_FOLDER
    if not os.path.isdir(place):
        return []
    named = sorted(place.iterdir(), key=lambda path: (path.name != DEFAULT_HEAD, path.name))
    return [folder for folder in (place, *named) if (folder / CONFIG_FILE).is_file()]


def resolve_head(model: str, revision: str | None = None) -> Path:
    """The local folder of a head named by path or hub repository (downloaded if need be).

    Raises CheckpointError when there is nothing, or something that is not a head folder.
    """
    path = _local(model)
    if os.path.isdir(path):  # os.path: False, not an error, for names that no file system takes
        return path
    if os.path.isfile(path):
        hint = "pickled weights are never loaded; " if path.suffix in PICKLE_SUFFIXES else ""
        raise CheckpointError(
            f"{model} is a file; {hint}a head is a folder with {CONFIG_FILE} and {WEIGHTS_FILE}; "
            "name the folder written by vllm_mtpc.checkpoint.save_head"
        )
    if not _HUB_NAME.fullmatch(model):
        raise CheckpointError(f"no head at {model}: the folder does not exist; correct the path of the head")
    return _download(model, revision)


def _download(repo: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import snapshot_download

        patterns = ["*.json", "*.safetensors", "README.md"]
        return Path(snapshot_download(repo, revision=revision, allow_patterns=patterns))
    except Exception as error:  # the hub client raises many kinds; a user needs one line whatever happened
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise CheckpointError(
            f"no head at {repo!r}: not a local folder, and not to be had from the hub ({reason}); "
            "correct the name of the head or download it first"
        ) from None


def resolve_verifier(folder: Path, name_or_path: str) -> str:
    """A head's verifier as vLLM may use it: relative paths start at the head's folder, names stay names."""
    candidate = folder / name_or_path
    return str(candidate.resolve()) if os.path.isdir(candidate) else name_or_path


def _local(path: str | Path) -> Path:
    """`path` with its ~ expanded, where there is such a user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)
