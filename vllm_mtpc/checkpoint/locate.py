"""Where a head is: a folder, a folder bundled inside a target, or a repository on the hub."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from vllm_mtpc.errors import CheckpointError, first_line
from vllm_mtpc.families import FAMILIES
from vllm_mtpc.files import read_json

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
U_EMBED_FILE = "u_embed.safetensors"  # of a PTP head, in the place of WEIGHTS_FILE
PROVENANCE_FILE = "provenance.json"
SERVED_FILE = "served.json"  # what `vllm-mtpc doctor` has measured
RECORDS = (PROVENANCE_FILE, SERVED_FILE)
SHIPPED_FOLDER = "mtpc"  # inside a target's folder
DEFAULT_HEAD = "default"  # of several heads in there
PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_TARGET_NAME = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")  # old ones on the hub have no owner: gpt2


def head_method(folder: Path) -> str | None:
    """Which of FAMILIES the head in a folder is served with, as its config.json says; None for no head of ours."""
    try:
        method = read_json(folder / CONFIG_FILE).get("speculators_model_type")
    except CheckpointError:
        return None
    return method if isinstance(method, str) and method in FAMILIES else None


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
    """The head at `path`, or the first of `bundled_heads`; None where there is none."""
    folder = _local(path)
    return next((place for place in (folder, *bundled_heads(folder)) if is_head(place)), None)


def bundled_heads(target: Path) -> list[Path]:
    """Folders of a target that hold a config of a head, readable or not, the one to be served first.

    That is `mtpc/`, else `mtpc/default/`, else the first of `mtpc/NAME/`. Without `mtpc/` all this costs is a look.
    """
    place = target / SHIPPED_FOLDER
    if not os.path.isdir(place):
        return []
    named = sorted(place.iterdir(), key=lambda path: (path.name != DEFAULT_HEAD, path.name))
    return [folder for folder in (place, *named) if (folder / CONFIG_FILE).is_file()]


def resolve_head(model: str, revision: str | None = None, max_bytes: int | None = None) -> Path:
    """The local folder of a head named by path or hub repository (downloaded if need be), or bundled by a target there.

    Without a head it is the folder as named, which is refused when it is read. Raises CheckpointError when there is
    nothing, or something that is not a head folder. With max_bytes a repository is downloaded only where its
    config.json is a head's and the files that are not in the cache have at most so many bytes.
    """
    path = _local(model)
    if os.path.isdir(path):  # os.path: False, not an error, for names that no file system takes
        return find_head(path) or path
    if os.path.isfile(path):
        hint = "pickled weights are never loaded; " if path.suffix in PICKLE_SUFFIXES else ""
        raise CheckpointError(
            f"{model} is a file; {hint}a head is a folder with {CONFIG_FILE} and {WEIGHTS_FILE}; "
            "name the folder written by vllm_mtpc.checkpoint.save_head"
        )
    if not HUB_NAME.fullmatch(model):
        raise CheckpointError(f"no head at {model}: the folder does not exist; correct the path of the head")
    path = download(model, "head", revision, max_bytes)
    return find_head(path) or path


def download(repo: str, kind: str, revision: str | None = None, max_bytes: int | None = None) -> Path:
    """The local copy of a head or target (`kind`) on the hub, its weights included; raises CheckpointError."""
    try:
        from huggingface_hub import constants, hf_hub_download, snapshot_download

        given: dict[str, Any] = {"revision": revision, "allow_patterns": ["*.json", "*.safetensors", "README.md"]}
        if max_bytes is not None and not constants.HF_HUB_OFFLINE:
            if not is_head(Path(hf_hub_download(repo, CONFIG_FILE, revision=revision)).parent):
                raise CheckpointError(f"{repo} on the hub is no head, as its {CONFIG_FILE} shows; name a head")
            files = snapshot_download(repo, **given, dry_run=True)
            if (size := sum(file.file_size for file in files if file.will_download)) > max_bytes:
                raise CheckpointError(
                    f"{repo} on the hub has {size / 2**30:.3g} GiB to download, allowed are {max_bytes / 2**30:.3g}; "
                    "download it on the server and name its folder"
                )
        return Path(snapshot_download(repo, **given))
    except CheckpointError:
        raise
    except Exception as error:  # the hub client raises many kinds; a user needs one line whatever happened
        raise CheckpointError(
            f"no {kind} at {repo!r}: not a local folder, and not to be had from the hub ({first_line(error)}); "
            f"correct the name of the {kind} or download it first"
        ) from None


def check_out(folder: Path) -> None:
    """Raise CheckpointError where a head would overwrite the config of another model."""
    if folder.joinpath(CONFIG_FILE).is_file() and not is_head(folder):
        raise CheckpointError(f"out={folder} holds another model's {CONFIG_FILE}; name another folder")


def verifier_name(target: str, out: Path) -> str:
    """How the config of the head in `out` names its target: a folder relative to the head's, a hub name as it is."""
    if not os.path.isdir(target):
        return target
    path = os.path.relpath(target, out)
    return path if path.startswith(".") else f"./{path}"  # without a dot it is a name on the hub


def hub_name(name: str) -> str | None:
    """The name of a target where it is one on the hub, None for a path."""
    return name if _TARGET_NAME.fullmatch(name) else None


def verifier_path(folder: Path, name: str) -> str | None:
    """The folder that a head's verifier is, there or not: a path starts at the head's; None for a name on the hub."""
    return None if hub_name(name) else os.path.realpath(folder / name)


def resolve_verifier(folder: Path, name: str) -> str:
    """A head's verifier as vLLM may use it, a folder or a name on the hub.

    Raises CheckpointError for a folder that is not there, and for what a head may not ask for: a downloaded one a
    folder outside of its repository, any head that a folder of its own passes for a model on the hub.
    """
    path = verifier_path(folder, name)
    says = f"{folder}: its {CONFIG_FILE} names the target {name!r}"
    if path is None:
        if os.path.lexists(folder / name):
            raise CheckpointError(
                f"{says}, a name on the hub, and a folder of that name is in the head; write './{name}' if that is the "
                "target, else delete it"
            )
        return name
    chosen = f'{{"method": "{head_method(folder) or next(iter(FAMILIES))}", "model": "{folder}"}}'
    give = f"type vllm serve TARGET --speculative-config '{chosen}'; vllm-mtpc's commands take --target TARGET"
    if (root := _repository(folder)) and os.path.commonpath((root, path)) != root:
        raise CheckpointError(f"{says}, which is outside of its repository on the hub; {give}")
    if not os.path.isdir(path):
        raise CheckpointError(f"{says}, and there is no folder {path}; put it there or {give}")
    return path


def _repository(folder: Path) -> str | None:
    """The repository in the hub's cache (models--OWNER--NAME/snapshots/COMMIT) that a folder is or lies in."""
    place = Path(os.path.realpath(folder))
    parts = (part for part in (place, *place.parents) if part.parent.name == "snapshots")
    return next((str(part) for part in parts if part.parent.parent.name.startswith("models--")), None)


def _local(path: str | Path) -> Path:
    """`path` with its ~ expanded, where there is such a user."""
    return Path(os.path.expanduser(path))
