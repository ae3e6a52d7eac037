"""Read the config.yaml of an MtPC run: YAML with OmegaConf's interpolations, resolved where they are used.

The file is not trusted. The only interpolation is `${a.b.c}` as a whole value, which cannot grow when it is resolved. A
value with another one (`${oc.env:A}`, `${a}-${b}`, `${.a}`) counts as missing, which is an error if it is needed.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from vllm_mtpc.errors import CheckpointError, first_line, one_line
from vllm_mtpc.files import read_yaml

_REFERENCE = re.compile(r"\$\{[A-Za-z_][\w-]*(\.[\w-]+)*\}")
MISSING = "???"  # OmegaConf's
Model = TypeVar("Model", bound=BaseModel)


class Settings:
    """The values of a config.yaml by dotted path.

    Args:
        file: The config.yaml.

    Raises:
        CheckpointError: The file does not exist or is not YAML.
    """

    def __init__(self, file: Path) -> None:
        if not file.exists():
            raise CheckpointError(
                f"{file.parent} has no {file.name}, which describes the checkpoints in it; copy it from their source"
            )
        self._file = file
        try:
            self._root = OmegaConf.create(_without_interpolations(read_yaml(file)), flags={"allow_objects": True})
        except OmegaConfBaseException as error:
            raise self._error("its values", error) from None

    def value(self, path: str, default: Any = None) -> Any:
        """Return the scalar or list of scalars at `path`, `default` if there is none; raises CheckpointError."""
        try:
            node = OmegaConf.select(self._root, path, default=default, throw_on_missing=True)
            parts = list(node) if isinstance(node, ListConfig) else [node]
        except OmegaConfBaseException as error:
            raise self._error(path, error) from None
        if any(isinstance(part, (DictConfig, ListConfig)) for part in parts):
            raise CheckpointError(f"{self._file}: {path}: a value or a list of values is expected; correct it")
        return parts if isinstance(node, ListConfig) else node

    def section(self, path: str, model: type[Model]) -> Model | None:
        """Return the mapping at `path` without nulls as `model`, None if there is none; raises CheckpointError."""
        try:
            node = OmegaConf.select(self._root, path)
        except OmegaConfBaseException as error:
            raise self._error(path, error) from None
        if node is None:
            return None
        if not isinstance(node, DictConfig):
            raise CheckpointError(f"{self._file}: {path} = {node!r}; a mapping is expected; correct it")
        values = {key: self.value(f"{path}.{key}") for key in map(str, node)}
        try:
            return model.model_validate({key: value for key, value in values.items() if value is not None})
        except ValidationError as error:
            reason = f"{one_line(error, model)}; convert another head"
            raise CheckpointError(f"{self._file}: {path}: {reason}") from None

    def _error(self, path: str, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{self._file}: {path}: {first_line(error)}; allowed: values, and interpolations ${{a.b.c}} as a whole "
            "value; write the value itself"
        )


def _without_interpolations(node: Any) -> Any:
    """Replace strings with an interpolation that is not a plain reference by MISSING."""
    if isinstance(node, dict):
        return {key: _without_interpolations(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_without_interpolations(value) for value in node]
    return MISSING if isinstance(node, str) and "${" in node and not _REFERENCE.fullmatch(node) else node
