"""Read a head folder whole, or refuse it with its first problem; read single tensors of a model's folder.

Adapters are PEFT's files (see `vllm_mtpc.heads.adapters`); PTP heads have them on every layer of the target.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from vllm_mtpc.checkpoint.locate import CONFIG_FILE, U_EMBED_FILE, WEIGHTS_FILE, head_method, require_weights
from vllm_mtpc.checkpoint.old_format import upgrade_config, upgrade_tensors
from vllm_mtpc.config.base import AnyHeadConfig
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.errors import CheckpointError, validate
from vllm_mtpc.families import FAMILIES
from vllm_mtpc.files import MAX_INDEX, open_tensors, read_json
from vllm_mtpc.heads.adapters import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, MODULES, Adapters
from vllm_mtpc.heads.head import Head, build_head

ADAPTER_FILES = (ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE)
# By dtype: integers of its size, and the bits of the exponent, which NaN and infinity have all.
FLOATS = {torch.float16: (torch.int16, 0x7C00), torch.bfloat16: (torch.int16, 0x7F80),
          torch.float32: (torch.int32, 0x7F800000)}  # fmt: skip
MAPS = {"d2t": (torch.int64,), "t2d": (torch.bool,)}  # of a draft vocabulary
INDEX_FILE = "model.safetensors.index.json"  # of a model's folder with several weight files
# Metadata of the head's weight file. It detects a save that was interrupted between the files of one head.
ADAPTER_DIGEST = "adapter_sha256"
WRITES_HIDDEN = ("o_proj", "down_proj")  # B [out, r] of these has the hidden size; A [r, in] of all others
_ADAPTER = re.compile(r"(?=.{1,256}$)base_model\.model\.(?:\w+\.)*layers\.\d+\.([\w.]+)\.lora_[AB]\.weight")
Shapes = Mapping[str, tuple[int, ...]]


class AdapterConfig(BaseModel):
    """The keys of PEFT's `adapter_config.json` that define the update alpha / r * B A. Other keys are ignored."""

    model_config = ConfigDict(strict=True)

    peft_type: Literal["LORA"]
    r: int = Field(ge=1)
    lora_alpha: float = Field(gt=0, allow_inf_nan=False)
    layers_to_transform: list[int] | None = None
    # Each of these makes another update of it.
    use_rslora: Literal[False] | None = False
    use_dora: Literal[False] | None = False
    rank_pattern: dict[str, int] | None = Field(None, max_length=0)
    alpha_pattern: dict[str, float] | None = Field(None, max_length=0)


def read_config(folder: Path) -> AnyHeadConfig:
    """Read and validate the config of a head folder; raises CheckpointError without one, or HeadConfigError."""
    method = head_method(folder) or next(iter(FAMILIES))  # the first family's config rejects an unknown method
    values = upgrade_config(read_json(folder / CONFIG_FILE), folder)
    return FAMILIES[method].config.parse(values, str(folder / CONFIG_FILE))


def read_circuit_config(folder: Path) -> HeadConfig:
    """Read the config of an MtPC head. Raises as `read_config`, and CheckpointError for a head of another method."""
    return require_method("mtpc", folder, read_config(folder))


def require_method(method: str, folder: Path, config: AnyHeadConfig) -> Any:
    """Return `config`. Raises CheckpointError if the head in `folder` has another method than `method`."""
    if (own := config.speculators_model_type) != method:
        remedy = f'name such a head, or serve this one with "method": "{own}"'
        raise CheckpointError(f"{folder} holds a head of method {own}; here one of method {method} is needed; {remedy}")
    return config


def check_tensors(folder: Path, config: AnyHeadConfig) -> Adapters | None:
    """Check names, shapes, dtypes and values of all tensors of a head; returns its adapters, None without.

    Raises CheckpointError unless the files hold exactly the tensors that `config` asks for, all finite.
    """
    return FAMILIES[config.speculators_model_type].check(folder, config)


def check_head(folder: Path, config: HeadConfig) -> Adapters | None:
    """`check_tensors` of an MtPC head."""
    return _read_head(folder, config)[1]


def load_head(
    folder: Path | str, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> tuple[HeadConfig, Head]:
    """Load an MtPC head, with parameters of `dtype` on `device`.

    Returns:
        The config, and the head in eval mode without gradients. It must be bound to its target (`hf.bind`).
        Draft layers are checked; `read_adapters` returns them.

    Raises:
        CheckpointError: A file is missing, damaged, or of another shape.
        HeadConfigError: The config is not valid.
    """
    config = read_circuit_config(Path(folder))
    head, _ = _read_head(Path(folder), config)
    return config, head.to(device, dtype).eval().requires_grad_(False)


def _read_head(folder: Path, config: HeadConfig) -> tuple[Head, Adapters | None]:
    file = require_weights(folder, WEIGHTS_FILE)
    with torch.device("meta"):
        head = build_head(config)
    expected, source = shapes_of(head.state_dict()), f"{CONFIG_FILE}: circuit, trunk, leaves, window, ..."
    sees_first = head.trunk.sees_first

    # shapes are checked before a tensor is read, also of a head that an earlier release wrote
    def check(shapes: Shapes) -> None:
        meta = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        check_shapes(file, shapes_of(upgrade_tensors(meta, sees_first)), expected, source)

    tensors = upgrade_tensors(read_tensors(file, check), sees_first)
    if config.draft_vocab_size:
        check_vocabulary(file, tensors["d2t"], tensors["t2d"])
    adapters = read_adapters(folder, config) if config.lora_layers else None
    head.load_state_dict(tensors, assign=True)  # after all checks
    return head, adapters


def check_vocabulary(file: Path, d2t: Tensor, t2d: Tensor) -> None:
    """Raise CheckpointError unless d2t are offsets of rising ids below V, and t2d is true at these ids alone."""
    ids = d2t + torch.arange(len(d2t))
    is_rising = bool((ids[1:] > ids[:-1]).all()) and int(ids[0]) >= 0 and int(ids[-1]) < len(t2d)
    if not is_rising or not torch.equal(t2d.nonzero()[:, 0], ids):
        reason = "t2d is not true exactly at the ids of d2t" if is_rising else "ids of d2t must rise, below vocab_size"
        raise CheckpointError(f"{file}: d2t and t2d are not one draft vocabulary ({reason}); train or copy it again")


def read_tensors(file: Path, check: Callable[[Shapes], None]) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, memory-mapped; `check` gets the header's shapes before any is read.

    Raises CheckpointError unless all are finite floats.
    """
    with open_tensors(file) as handle:
        names = sorted(handle.keys())
        check({name: tuple(handle.get_slice(name).get_shape()) for name in names})
        return {name: check_values(file, name, handle.get_tensor(name), MAPS.get(name, FLOATS)) for name in names}


def check_values(file: Path, name: str, tensor: Tensor, dtypes: Collection[torch.dtype] = FLOATS) -> Tensor:
    """Return `tensor`. Raises CheckpointError unless it has one of the dtypes and is finite."""
    if tensor.dtype not in dtypes:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise CheckpointError(f"{file}: tensor {name!r} is {tensor.dtype}; allowed: {allowed}")
    if tensor.dtype == torch.bool:
        return tensor
    # by numpy: on a GPU vLLM forks the engine, which would wait for ever for threads that PyTorch starts here
    integers, exponent = FLOATS.get(tensor.dtype, (tensor.dtype, -1))  # -1: integers, which are finite
    if (tensor.contiguous().view(integers).numpy() & exponent).max(initial=0) == exponent:
        raise CheckpointError(f"{file}: tensor {name!r} holds NaN or infinity; train or copy it again")
    return tensor


def check_shapes(file: Path, shapes: Shapes, expected: Mapping[str, tuple[int | None, ...]], source: str) -> None:
    """Raise CheckpointError unless a file has exactly the expected tensors.

    None in a shape of `expected` is any size. `source` names the settings that `expected` follows from, for errors.
    """
    missing, extra = sorted(expected.keys() - shapes.keys()), sorted(shapes.keys() - expected.keys())
    if missing:
        raise CheckpointError(f"{file}: tensor(s) missing: {', '.join(missing)}; copy or save it again")
    if extra:
        allowed = ", ".join(sorted(expected))
        raise CheckpointError(f"{file}: unknown tensor(s): {', '.join(extra)}; allowed: {allowed}; save it again")
    for name, wanted in expected.items():
        given = shapes[name]
        if len(given) != len(wanted) or any(size not in (None, own) for size, own in zip(wanted, given, strict=True)):
            shown = ", ".join("any" if size is None else str(size) for size in wanted)
            raise CheckpointError(
                f"{file}: tensor {name!r} has shape {given}; expected: ({shown}) by {source}; correct that, or "
                "copy the file again"
            )


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors by name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def read_adapters(folder: Path, config: AnyHeadConfig) -> Adapters:
    """Read PEFT's files of a head: A [rank, in] and B [out, rank] of each module of a PTP head's, or draft layers.

    Raises CheckpointError for a missing or damaged file, and for adapters that the head was not saved with.
    """
    weights, count = (WEIGHTS_FILE, config.lora_layers) if isinstance(config, HeadConfig) else (U_EMBED_FILE, None)
    for name in ADAPTER_FILES:
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder} has no {name}, which this head needs; copy the whole folder again")
    settings, file = folder / ADAPTER_CONFIG_FILE, folder / ADAPTER_WEIGHTS_FILE
    peft = validate(AdapterConfig, read_json(settings), CheckpointError, f"{settings}: ", "; save the head again")
    given, total = peft.layers_to_transform, config.transformer_layer_config.get("num_hidden_layers")
    end = total or (given[-1] + 1 if given else 0)
    layers = list(range(0 if count is None else end - count, end))
    if given != (None if count is None else layers):
        allowed = "null, every layer" if count is None else f"{layers}, the last {count} layers of the target"
        raise CheckpointError(f"{settings}: layers_to_transform = {given}; allowed: {allowed}; save the head again")
    tensors = read_tensors(file, lambda shapes: check_adapter_shapes(file, shapes, layers, peft.r, config.hidden_size))
    with open_tensors(folder / weights) as handle:
        digest = (handle.metadata() or {}).get(ADAPTER_DIGEST)
    if adapter_digest({name: (folder / name).read_bytes() for name in ADAPTER_FILES}) != digest:
        names = " and ".join(ADAPTER_FILES)
        raise CheckpointError(f"{folder}: {names} are not those {weights} was saved with; copy the folder again")
    return Adapters(layers, peft.r, peft.lora_alpha, module_names(tensors), tensors)


def adapter_digest(contents: Mapping[str, bytes]) -> str:
    """Return the SHA-256 of the adapters' files, given by name."""
    return hashlib.sha256(b"".join(contents[name] for name in ADAPTER_FILES)).hexdigest()


def check_adapter_shapes(file: Path, shapes: Shapes, layers: Sequence[int], rank: int, hidden_size: int) -> None:
    """Raise CheckpointError unless all `layers` have A [rank, in] and B [out, rank] of the same modules."""
    matches = {name: match for name in shapes if (match := _ADAPTER.fullmatch(name))}
    modules = {match[1] for match in matches.values()} or {"self_attn.q_proj"}
    prefix = next((name.partition("layers.")[0] for name in matches), "base_model.model.")
    expected: dict[str, tuple[int | None, ...]] = {}
    for module in sorted(modules):
        name = module.rpartition(".")[2]
        if name not in MODULES:
            raise CheckpointError(f"{file}: adapters of {name}; allowed: {', '.join(MODULES)}; save the head again")
        inner, outer = (None, hidden_size) if name in WRITES_HIDDEN else (hidden_size, None)
        for layer in layers:
            expected[f"{prefix}layers.{layer}.{module}.lora_A.weight"] = (rank, inner)
            expected[f"{prefix}layers.{layer}.{module}.lora_B.weight"] = (outer, rank)
    check_shapes(file, shapes, expected, "r and the target's hidden_size")


def module_names(names: Iterable[str]) -> list[str]:
    """Return the adapted modules, as PEFT's `target_modules` lists them, of tensors with these names."""
    matches = map(_ADAPTER.fullmatch, names)
    return sorted({match[1].rpartition(".")[2] for match in matches if match})


class Shards:
    """The tensors of a model's folder; raises CheckpointError without a readable file or index with plain names."""

    def __init__(self, folder: Path) -> None:
        self.folder, index = folder, folder / INDEX_FILE
        if not index.exists():
            with open_tensors(folder / WEIGHTS_FILE) as handle:
                self.files = dict.fromkeys(handle.keys(), folder / WEIGHTS_FILE)  # of each tensor
            return
        named = read_json(index, MAX_INDEX).get("weight_map")
        if not isinstance(named, dict) or not named:
            raise CheckpointError(f"{index}: has no weight_map; copy the folder again")
        for name in named.values():
            if not isinstance(name, str) or Path(name).name != name or not name.isprintable():
                reason = f"weight_map has {name!r}; allowed: the name of a file next to it"
                raise CheckpointError(f"{index}: {reason}; copy the folder again")
        self.files = {tensor: folder / name for tensor, name in named.items()}

    def read(self, name: str, dtypes: Collection[torch.dtype] = FLOATS) -> Tensor:
        """Return a tensor, memory-mapped; raises CheckpointError unless it exists, as `check_values` allows it."""
        if name not in self.files:
            raise CheckpointError(f"{self.folder}: tensor(s) missing: {name}; copy it whole, or name another model")
        with open_tensors(self.files[name]) as handle:  # raises for a name that only the index has
            return check_values(self.files[name], name, handle.get_tensor(name), dtypes)

    def find_suffix(self, end: str) -> str | None:
        """Return the tensor named `end` or `PREFIX.end`, None if there is none or several; MTP layers have copies."""
        found = [name for name in self.files if name == end or name.endswith(f".{end}")]
        found = [name for name in found if ".layers." not in name] or found
        return found[0] if len(found) == 1 else None
