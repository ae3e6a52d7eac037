"""The files of a head's draft layers (PEFT's, see `vllm_mtpc.heads.adapters`): what they say, and whether it holds."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vllm_mtpc.checkpoint.locate import WEIGHTS_FILE
from vllm_mtpc.checkpoint.tensors import check_names, checked, stored_shapes
from vllm_mtpc.config.mtpc import HeadConfig
from vllm_mtpc.errors import CheckpointError
from vllm_mtpc.files import open_tensors, read_json
from vllm_mtpc.heads.adapters import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, MODULES

FILES = (ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE)
# In the metadata of the head's weight file: a save that ended between the files of one head is found.
ADAPTER_DIGEST = "adapter_sha256"
WRITES_HIDDEN = ("o_proj", "down_proj")  # B [out, r] of these has the hidden size; A [r, in] of all others
OTHER_UPDATES = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern")
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
    check_files(folder, f"lora_layers={config.lora_layers}")
    last, count = config.transformer_layer_config.get("num_hidden_layers"), config.lora_layers
    layers, rank, alpha, modules = read_adapter_config(
        folder / ADAPTER_CONFIG_FILE,
        lambda given: (
            _is_list_of(int)(given)
            and given == list(range(given[0], given[0] + count))
            and (last is None or given[-1] == last - 1)
        ),
        f"the last {count} layers of the target" + (f", {list(range(last - count, last))}" if last else ""),
    )
    tensors = adapter_tensors(folder / ADAPTER_WEIGHTS_FILE, layers, rank, config.hidden_size)
    parameters = sum(tensor.numel() for _, tensor in tensors)
    check_digest(folder, WEIGHTS_FILE)
    return AdapterInfo(layers, rank, alpha, modules, parameters)


def load_adapters(
    folder: Path, config: HeadConfig, dtype: torch.dtype, device: torch.device | str
) -> tuple[AdapterInfo, dict[str, Tensor]]:
    """The adapters of a head with draft layers, by PEFT's names, each checked; raises CheckpointError."""
    info = check_adapters(folder, config)
    tensors = adapter_tensors(folder / ADAPTER_WEIGHTS_FILE, info.layers, info.rank, config.hidden_size)
    return info, {name: tensor.to(device=device, dtype=dtype) for name, tensor in tensors}


def check_files(folder: Path, reason: str) -> None:
    """Raise CheckpointError unless a folder has the adapters' files; `reason` is what its config.json says of them."""
    for name in FILES:
        if not (folder / name).is_file():
            raise CheckpointError(
                f"{folder} has no {name}, but its config.json says {reason}; copy the whole folder again, or save the "
                "head with its adapters"
            )


def check_digest(folder: Path, file: str) -> None:
    """Raise CheckpointError unless a folder's adapters are those that its weight file `file` was saved with."""
    with open_tensors(folder / file) as handle:
        expected = (handle.metadata() or {}).get(ADAPTER_DIGEST)
    if adapter_digest({name: (folder / name).read_bytes() for name in FILES}) != expected:
        raise CheckpointError(
            f"{folder}: {' and '.join(FILES)} are not those {file} was saved with; copy the folder again, "
            "or save the head with its adapters"
        )


def read_adapter_config(
    file: Path, layers_fit: Callable[[Any], bool], allowed_layers: str
) -> tuple[Any, int, float, list[str]]:
    """layers_to_transform, r, lora_alpha and target_modules of PEFT's config, each checked."""
    values = read_json(file)

    def value(key: str, fits: Any, allowed: str) -> Any:
        if not fits(given := values.get(key)):
            raise CheckpointError(f"{file}: {key} = {given!r}; allowed: {allowed}; save the head again")
        return given

    value("peft_type", lambda kind: kind == "LORA", "'LORA'")
    for key in OTHER_UPDATES:  # would make the update another one than alpha / r * B A
        value(key, lambda given: not given, "nothing that is not false or empty")
    rank = value("r", lambda r: type(r) is int and r >= 1, "an integer from 1")
    alpha = value("lora_alpha", lambda a: type(a) in (int, float) and a > 0, "a number above 0")
    modules = value("target_modules", _is_list_of(str), "a list of module names")
    layers = value("layers_to_transform", layers_fit, allowed_layers)
    return layers, rank, alpha, sorted(modules)


def _is_list_of(kind: type) -> Any:
    return lambda given: isinstance(given, list) and len(given) > 0 and all(type(part) is kind for part in given)


def adapter_tensors(file: Path, layers: Collection[int], rank: int, hidden_size: int) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of every tensor of an adapter file, each checked."""
    with open_tensors(file) as handle:
        shapes = stored_shapes(handle)
        check_adapter_shapes(file, shapes, layers, rank, hidden_size)
        for name in shapes:
            yield name, checked(file, name, handle.get_tensor(name))


def check_adapter_shapes(
    file: Path, shapes: Mapping[str, tuple[int, ...]], layers: Collection[int], rank: int, hidden_size: int
) -> None:
    """Raise CheckpointError unless every layer has A [rank, in] and B [out, rank] of the same modules of MODULES."""
    matches = {name: _TENSOR.fullmatch(name) for name in shapes}
    # What one tensor says of modules and of the place of layers, the file must hold whole.
    modules = {match["module"] for match in matches.values() if match}
    prefix = next((name.partition("layers.")[0] for name, match in matches.items() if match), "base_model.model.")
    expected = {
        f"{prefix}layers.{layer}.{module}.lora_{part}.weight"
        for layer in layers
        for module in modules or {"self_attn.q_proj"}
        for part in "AB"
    }
    check_names(file, set(shapes), expected)
    for name, shape in sorted(shapes.items()):
        module = matches[name]["module"].rpartition(".")[2]
        if module not in MODULES:
            raise CheckpointError(
                f"{file}: tensor {name!r} adapts {module}; allowed: {', '.join(MODULES)}; save the head again"
            )
        side, other = (0, 1) if (is_a := matches[name]["part"] == "A") else (1, 0)
        wanted = {side: rank} | ({other: hidden_size} if (module in WRITES_HIDDEN) != is_a else {})
        if len(shape) != 2 or any(shape[at] != size for at, size in wanted.items()):
            raise CheckpointError(
                f"{file}: tensor {name!r} has shape {shape}; r and the target's hidden_size ask for "
                f"({wanted.get(0, 'out')}, {wanted.get(1, 'in')}); save the head again, or name its own target"
            )


def module_names(names: Iterable[str]) -> list[str]:
    """The adapted modules, as PEFT's target_modules names them, of the tensors that are adapters' by their names."""
    matches = map(_TENSOR.fullmatch, names)
    return sorted({match["module"].rpartition(".")[2] for match in matches if match})
