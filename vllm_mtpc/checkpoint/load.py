"""Reading a head. A bad checkpoint is refused whole, with the first thing that is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vllm_mtpc.checkpoint.adapters import AdapterInfo, check_adapters
from vllm_mtpc.checkpoint.locate import CONFIG_FILE, WEIGHTS_FILE, head_method, holds, require_weights
from vllm_mtpc.checkpoint.tensors import check_names, checked
from vllm_mtpc.config.base import AnyHeadConfig
from vllm_mtpc.config.mtpc import HeadConfig
from vllm_mtpc.errors import CheckpointError
from vllm_mtpc.families import FAMILIES
from vllm_mtpc.files import open_tensors
from vllm_mtpc.heads import build_head

if TYPE_CHECKING:
    from vllm_mtpc.heads.base import Head


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
    return check_adapters(folder, config)


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
    check_adapters(folder, config)
    head.load_state_dict(tensors, assign=True)
    return config, head.eval().requires_grad_(False)


def _tensors(folder: Path, config: HeadConfig):
    """Yield (name, tensor) of every tensor of a head, each checked; memory-mapped, one at a time."""
    file = require_weights(folder, WEIGHTS_FILE)
    with torch.device("meta"):
        expected = {name: tuple(value.shape) for name, value in build_head(config).state_dict().items()}
    with open_tensors(file) as handle:
        check_names(file, set(handle.keys()), set(expected))
        for name, shape in expected.items():
            given = tuple(handle.get_slice(name).get_shape())
            if given != shape:
                raise CheckpointError(
                    f"{file}: tensor {name!r} has shape {given}; {CONFIG_FILE} (circuit, window, num_components, "
                    f"vocab_size, hidden_size, expander_...) asks for {shape}; correct it or save the head again"
                )
        for name in expected:
            yield name, checked(file, name, handle.get_tensor(name))
