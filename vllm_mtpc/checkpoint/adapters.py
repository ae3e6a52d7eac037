"""The files of a head's draft layers (PEFT's, see `vllm_mtpc.heads.adapters`): what they say, and whether it holds."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vllm_mtpc.checkpoint.locate import WEIGHTS_FILE
from vllm_mtpc.checkpoint.tensors import check_names, checked, open_tensors
from vllm_mtpc.config import HeadConfig
from vllm_mtpc.errors import CheckpointError
from vllm_mtpc.heads.adapters import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE

FILES = (ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE)
# In the metadata of the head's weight file: a save that ended between the files of one head is found.
ADAPTER_DIGEST = "adapter_sha256"
_TENSOR = re.compile(
    r"base_model\.model\.(?:\w+\.)*layers\.(?P<layer>\d+)\.(?P<module>[\w.]+)\.lora_(?P<part>[AB])\.weight"
)


class AdapterInfo(NamedTuple):
    """What the adapters of a head are."""

    layers: list[int]  # of the target, 0-based
    rank: int
    alpha: float
    modules: list[str]
    parameters: int


def adapter_digest(contents: Mapping[str, bytes]) -> str:
    """SHA-256 of the adapters' files, by name."""
    return hashlib.sha256(b"".join(contents[name] for name in FILES)).hexdigest()


def check_adapters(folder: Path, config: HeadConfig) -> AdapterInfo | None:
    """The adapters of a head, every tensor checked; None for a head without. Raises CheckpointError."""
    if not config.lora_layers:
        return None
    for name in FILES:
        if not (folder / name).is_file():
            raise CheckpointError(
                f"{folder} has no {name}, but its config.json says lora_layers={config.lora_layers}; copy the whole "
                "folder again, or save the head with its draft layers"
            )
    layers, rank, alpha, modules = _read_config(folder / ADAPTER_CONFIG_FILE, config)
    parameters = _check_tensors(folder / ADAPTER_WEIGHTS_FILE, layers, rank)
    with open_tensors(folder / WEIGHTS_FILE) as handle:
        expected = (handle.metadata() or {}).get(ADAPTER_DIGEST)
    if adapter_digest({name: (folder / name).read_bytes() for name in FILES}) != expected:
        raise CheckpointError(
            f"{folder}: {' and '.join(FILES)} are not those {WEIGHTS_FILE} was saved with; copy the folder again, "
            "or save the head with its draft layers"
        )
    return AdapterInfo(layers, rank, alpha, modules, parameters)


def _read_config(file: Path, config: HeadConfig) -> tuple[list[int], int, float, list[str]]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: cannot be read as JSON ({error}); copy the head again") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{file}: holds a {type(values).__name__}; a JSON object is expected; copy it again")

    def value(key: str, fits: Any, allowed: str) -> Any:
        if not fits(given := values.get(key)):
            raise CheckpointError(f"{file}: {key} = {given!r}; allowed: {allowed}; save the head again")
        return given

    value("peft_type", lambda kind: kind == "LORA", "'LORA'")
    rank = value("r", lambda r: type(r) is int and r >= 1, "an integer from 1")
    alpha = value("lora_alpha", lambda a: type(a) in (int, float) and a > 0, "a number above 0")
    modules = value("target_modules", _is_list_of(str), "a list of module names")
    last = config.transformer_layer_config.get("num_hidden_layers")
    count = config.lora_layers
    shown = f"the last {count} layers of the target" + (f", {list(range(last - count, last))}" if last else "")
    layers = value(
        "layers_to_transform",
        lambda given: (
            _is_list_of(int)(given)
            and given == list(range(given[0], given[0] + count))
            and (last is None or given[-1] == last - 1)
        ),
        shown,
    )
    return layers, rank, alpha, sorted(modules)


def _is_list_of(kind: type) -> Any:
    return lambda given: isinstance(given, list) and len(given) > 0 and all(type(part) is kind for part in given)


def _check_tensors(file: Path, layers: list[int], rank: int) -> int:
    """Check every tensor of an adapter file; returns the number of parameters."""
    with open_tensors(file) as handle:
        names = set(handle.keys())
        matches = {name: _TENSOR.fullmatch(name) for name in names}
        # Every layer has the same modules, each with A and B: what one tensor says, the file must hold whole.
        modules = {match["module"] for match in matches.values() if match}
        prefix = next((name.partition("layers.")[0] for name, match in matches.items() if match), "base_model.model.")
        check_names(
            file,
            names,
            {
                f"{prefix}layers.{layer}.{module}.lora_{part}.weight"
                for layer in layers
                for module in modules or {"self_attn.q_proj"}
                for part in "AB"
            },
        )
        parameters = 0
        for name in sorted(names):
            shape = tuple(handle.get_slice(name).get_shape())
            at = 0 if matches[name]["part"] == "A" else 1
            if len(shape) != 2 or shape[at] != rank:
                wanted = f"({rank}, in)" if at == 0 else f"(out, {rank})"
                raise CheckpointError(
                    f"{file}: tensor {name!r} has shape {shape}; {ADAPTER_CONFIG_FILE} (r) asks for {wanted}; save the "
                    "head again"
                )
            parameters += checked(file, name, handle.get_tensor(name)).numel()
    return parameters
