"""Reading a head and the adapters of its draft layers. A bad one is refused whole, with the first thing wrong with it.

The adapters are PEFT's files (see `vllm_mtpc.heads.adapters`); PTP heads have them too, on every layer.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vllm_mtpc.checkpoint.locate import CONFIG_FILE, WEIGHTS_FILE, head_method, holds, require_weights
from vllm_mtpc.config.base import AnyHeadConfig
from vllm_mtpc.config.mtpc import HeadConfig
from vllm_mtpc.errors import CheckpointError
from vllm_mtpc.families import FAMILIES
from vllm_mtpc.files import open_tensors, read_json
from vllm_mtpc.heads import build_head
from vllm_mtpc.heads.adapters import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, MODULES
from vllm_mtpc.heads.base import Head

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
ADAPTER_FILES = (ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE)
# In the metadata of the head's weight file: a save that ended between the files of one head is found.
ADAPTER_DIGEST = "adapter_sha256"
WRITES_HIDDEN = ("o_proj", "down_proj")  # B [out, r] of these has the hidden size; A [r, in] of all others
OTHER_UPDATES = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern")
_ADAPTER = re.compile(
    r"base_model\.model\.(?:\w+\.)*layers\.(?P<layer>\d+)\.(?P<module>[\w.]+)\.lora_(?P<part>[AB])\.weight"
)
Shapes = Mapping[str, tuple[int, ...]]


class AdapterInfo(NamedTuple):
    """What the adapters of a head are."""

    layers: list[int]  # of the target, 0-based
    rank: int
    alpha: float
    modules: list[str]
    parameters: int


def read_config(folder: Path) -> AnyHeadConfig:
    """The validated config of a head folder; raises CheckpointError or HeadConfigError."""
    if not holds(folder, CONFIG_FILE):
        raise CheckpointError(f"{folder} has no {CONFIG_FILE}; name a head folder, not a target or its parent")
    method = head_method(folder) or next(iter(FAMILIES))  # of no family: refused by the key that should say so
    return FAMILIES[method].config.read(folder / CONFIG_FILE)


def read_circuit_config(folder: Path) -> HeadConfig:
    """As read_config, for what only works with circuits; raises CheckpointError for a PTP head."""
    return of_method("mtpc", folder, read_config(folder))


def of_method(method: str, folder: Path, config: AnyHeadConfig) -> Any:
    """`config`, of the head in `folder`; raises CheckpointError where it is of another method."""
    if (own := config.speculators_model_type) != method:
        raise CheckpointError(
            f"{folder} holds a head of method {own}; here one of method {method} is needed; name such a head, or "
            f'serve this one with "method": "{own}"'
        )
    return config


def check_tensors(folder: Path, config: AnyHeadConfig) -> AdapterInfo | None:
    """What a head's adapters are (None: it has none).

    Raises CheckpointError unless the files hold exactly the tensors of the head and its adapters, all finite.
    """
    return FAMILIES[config.speculators_model_type].check(folder, config)


def check_head(folder: Path, config: HeadConfig) -> AdapterInfo | None:
    """As check_tensors, of an MtPC head."""
    for _ in _tensors(folder, config):
        pass
    return load_adapters(folder, config)[0] if config.lora_layers else None


def load_head(
    folder: Path | str, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> tuple[HeadConfig, Head]:
    """Config and head (eval mode, no gradients) of a folder; raises CheckpointError or HeadConfigError.

    A head with `needs_lm_head` has to be lent one before use. Draft layers are checked here, and loaded on their target
    by `vllm_mtpc.heads.adapters.DraftLayers.load`.
    """
    folder = Path(folder)
    config = read_circuit_config(folder)
    with torch.device("meta"):
        head = build_head(config)
    tensors = {name: tensor.to(device=device, dtype=dtype) for name, tensor in _tensors(folder, config)}
    if config.lora_layers:
        load_adapters(folder, config)
    head.load_state_dict(tensors, assign=True)
    return config, head.eval().requires_grad_(False)


def _tensors(folder: Path, config: HeadConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of every tensor of a head without its adapters, each checked."""
    file = require_weights(folder, WEIGHTS_FILE)
    with torch.device("meta"):
        expected = build_head(config).state_dict()
    keys = "circuit, window, num_components, vocab_size, hidden_size, expander_..."
    return read_tensors(file, lambda shapes: check_shapes(file, shapes, expected, keys))


def read_tensors(file: Path, check: Callable[[Shapes], None]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of a file whose names and shapes `check` lets pass; memory-mapped, one at a time.

    Raises CheckpointError for a tensor that is not float and finite.
    """
    with open_tensors(file) as handle:
        names = sorted(handle.keys())
        check({name: tuple(handle.get_slice(name).get_shape()) for name in names})
        for name in names:
            yield name, checked(file, name, handle.get_tensor(name))


def checked(file: Path, name: str, tensor: Tensor) -> Tensor:
    """`tensor`; raises CheckpointError unless it is float and finite."""
    if tensor.dtype not in FLOATS:
        raise CheckpointError(f"{file}: tensor {name!r} is {tensor.dtype}; allowed: float16, bfloat16, float32")
    if not bool(torch.isfinite(tensor).all()):
        raise CheckpointError(
            f"{file}: tensor {name!r} holds NaN or infinity; the head is damaged, train or copy it again"
        )
    return tensor


def check_shapes(file: Path, shapes: Shapes, expected: Mapping[str, Tensor], keys: str) -> None:
    """Raise CheckpointError unless names and shapes are the expected ones, which `keys` of config.json ask for."""
    check_names(file, shapes.keys(), expected.keys())
    for name, tensor in expected.items():
        if shapes[name] != tuple(tensor.shape):
            raise CheckpointError(
                f"{file}: tensor {name!r} has shape {shapes[name]}; {CONFIG_FILE} ({keys}) asks for "
                f"{tuple(tensor.shape)}; correct it or save the head again"
            )


def check_names(file: Path, given: Set[str], expected: Set[str]) -> None:
    """Raise CheckpointError unless a file holds exactly the expected tensors."""
    missing, extra = sorted(expected - given), sorted(given - expected)
    if missing:
        raise CheckpointError(f"{file}: tensor(s) missing: {', '.join(missing)}; save the head again")
    if extra:
        raise CheckpointError(
            f"{file}: unknown tensor(s): {', '.join(extra)}; allowed: {', '.join(sorted(expected))}; save it again"
        )


def load_adapters(
    folder: Path, config: HeadConfig, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> tuple[AdapterInfo, dict[str, Tensor]]:
    """The adapters of a head with draft layers, by PEFT's names, each checked; raises CheckpointError."""
    check_adapter_files(folder, f"lora_layers={config.lora_layers}")
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
    stored = read_adapters(folder / ADAPTER_WEIGHTS_FILE, layers, rank, config.hidden_size)
    tensors = {name: tensor.to(device=device, dtype=dtype) for name, tensor in stored}
    parameters = sum(tensor.numel() for tensor in tensors.values())
    check_digest(folder, WEIGHTS_FILE)
    return AdapterInfo(layers, rank, alpha, modules, parameters), tensors


def check_adapter_files(folder: Path, reason: str) -> None:
    """Raise CheckpointError unless a folder has the adapters' files; `reason` is what its config.json says of them."""
    for name in ADAPTER_FILES:
        if not (folder / name).is_file():
            raise CheckpointError(
                f"{folder} has no {name}, but its config.json says {reason}; copy the whole folder again, or save the "
                "head with its adapters"
            )


def adapter_digest(contents: Mapping[str, bytes]) -> str:
    """SHA-256 of the adapters' files, by name."""
    return hashlib.sha256(b"".join(contents[name] for name in ADAPTER_FILES)).hexdigest()


def check_digest(folder: Path, file: str) -> dict[str, str]:
    """Metadata of the weight file `file`; raises CheckpointError unless it was saved with the adapters next to it."""
    with open_tensors(folder / file) as handle:
        metadata = handle.metadata() or {}
    if adapter_digest({name: (folder / name).read_bytes() for name in ADAPTER_FILES}) != metadata.get(ADAPTER_DIGEST):
        raise CheckpointError(
            f"{folder}: {' and '.join(ADAPTER_FILES)} are not those {file} was saved with; copy the folder again, "
            "or save the head with its adapters"
        )
    return metadata


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


def read_adapters(file: Path, layers: Collection[int], rank: int, hidden_size: int) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of every tensor of an adapter file, each checked."""
    return read_tensors(file, lambda shapes: check_adapter_shapes(file, shapes, layers, rank, hidden_size))


def check_adapter_shapes(file: Path, shapes: Shapes, layers: Collection[int], rank: int, hidden_size: int) -> None:
    """Raise CheckpointError unless every layer has A [rank, in] and B [out, rank] of the same modules of MODULES."""
    matches = {name: match for name in shapes if (match := _ADAPTER.fullmatch(name))}
    # What one tensor says of modules and of the place of layers, the file must hold whole.
    prefix = next((name.partition("layers.")[0] for name in matches), "base_model.model.")
    modules = {match["module"] for match in matches.values()} or {"self_attn.q_proj"}
    ends = [f"{module}.lora_{part}.weight" for module in modules for part in "AB"]
    check_names(file, shapes.keys(), {f"{prefix}layers.{layer}.{end}" for layer in layers for end in ends})
    for name, shape in sorted(shapes.items()):
        module, is_a = matches[name]["module"].rpartition(".")[2], matches[name]["part"] == "A"
        if module not in MODULES:
            raise CheckpointError(
                f"{file}: tensor {name!r} adapts {module}; allowed: {', '.join(MODULES)}; save the head again"
            )
        other = hidden_size if (module in WRITES_HIDDEN) != is_a else None
        wanted = (rank, other) if is_a else (other, rank)
        if len(shape) != 2 or any(size not in (None, given) for size, given in zip(wanted, shape, strict=True)):
            shown = f"({wanted[0] or 'out'}, {wanted[1] or 'in'})"
            raise CheckpointError(
                f"{file}: tensor {name!r} has shape {shape}; r and the target's hidden_size ask for {shown}; save the "
                "head again, or name its own target"
            )


def module_names(names: Iterable[str]) -> list[str]:
    """The adapted modules, as PEFT's target_modules names them, of the tensors that are adapters' by their names."""
    matches = map(_ADAPTER.fullmatch, names)
    return sorted({match["module"].rpartition(".")[2] for match in matches if match})
