"""Reading a head. A bad checkpoint is refused whole, with the first thing that is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open

from vllm_mtpc.checkpoint.locate import CONFIG_FILE, PICKLE_SUFFIXES, WEIGHTS_FILE
from vllm_mtpc.config import HeadConfig
from vllm_mtpc.errors import CheckpointError
from vllm_mtpc.heads import build_head

if TYPE_CHECKING:
    from vllm_mtpc.heads.linear import LinearHead

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def read_config(folder: Path) -> HeadConfig:
    """The validated config of a head folder; raises CheckpointError or HeadConfigError."""
    if not (folder / CONFIG_FILE).is_file():
        raise CheckpointError(f"{folder} has no {CONFIG_FILE}; name a head folder, not a target or its parent")
    return HeadConfig.read(folder / CONFIG_FILE)


def check_tensors(folder: Path, config: HeadConfig) -> None:
    """Raise CheckpointError unless the weight file holds exactly the head's tensors, all finite."""
    for _ in _tensors(folder, config):
        pass


def load_head(
    folder: Path | str, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> tuple[HeadConfig, LinearHead]:
    """Config and head (eval mode, no gradients) of a folder; raises CheckpointError or HeadConfigError."""
    folder = Path(folder)
    config = read_config(folder)
    with torch.device("meta"):
        head = build_head(config)
    tensors = {name: tensor.to(device=device, dtype=dtype) for name, tensor in _tensors(folder, config)}
    head.load_state_dict(tensors, assign=True)
    return config, head.eval().requires_grad_(False)


def _tensors(folder: Path, config: HeadConfig):
    """Yield (name, tensor) of every tensor of a head, each checked; memory-mapped, one at a time."""
    file = folder / WEIGHTS_FILE
    if not file.is_file():
        pickled = [path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES]
        found = f" (found {', '.join(sorted(pickled))}: pickled weights are never loaded)" if pickled else ""
        raise CheckpointError(
            f"{folder} has no {WEIGHTS_FILE}{found}; save the head with vllm_mtpc.checkpoint.save_head"
        )
    with torch.device("meta"):
        expected = {name: tuple(value.shape) for name, value in build_head(config).state_dict().items()}
    try:
        with safe_open(str(file), framework="pt") as handle:
            _check_names(file, set(handle.keys()), set(expected))
            for name, shape in expected.items():
                given = tuple(handle.get_slice(name).get_shape())
                if given != shape:
                    raise CheckpointError(
                        f"{file}: tensor {name!r} has shape {given}; {CONFIG_FILE} (circuit, window, num_components, "
                        f"vocab_size, hidden_size) asks for {shape}; correct the config or save the head again"
                    )
            for name in expected:
                yield name, _checked(file, name, handle.get_tensor(name))
    except (SafetensorError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"{file}: not a readable safetensors file ({reason}); copy the head again") from None


def _check_names(file: Path, given: set[str], expected: set[str]) -> None:
    missing, extra = sorted(expected - given), sorted(given - expected)
    if missing:
        raise CheckpointError(f"{file}: tensor(s) missing: {', '.join(missing)}; save the head again")
    if extra:
        raise CheckpointError(
            f"{file}: unknown tensor(s): {', '.join(extra)}; allowed: {', '.join(sorted(expected))}; save it again"
        )


def _checked(file: Path, name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype not in FLOATS:
        raise CheckpointError(f"{file}: tensor {name!r} is {tensor.dtype}; allowed: float16, bfloat16, float32")
    if not bool(torch.isfinite(tensor).all()):
        raise CheckpointError(
            f"{file}: tensor {name!r} holds NaN or infinity; the head is damaged, train or copy it again"
        )
    return tensor
