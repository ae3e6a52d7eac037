"""config.yaml of an MtPC run: YAML with the interpolations OmegaConf leaves in it, resolved where they are asked for.

Anyone may have written the file. Of interpolations only `${a.b.c}` as a whole value is left to OmegaConf, which cannot
grow; a value with others in it (`${oc.env:A}`, `${a}-${b}`, `${.a}`) is missing to it, and refused if it is needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from vllm_mtpc.errors import CheckpointError, first_line
from vllm_mtpc.files import read_yaml

_WHOLE = re.compile(r"\$\{[A-Za-z_][\w-]*(\.[\w-]+)*\}")
MISSING = "???"  # OmegaConf's


class Settings:
    """The values of a config.yaml by dotted path."""

    def __init__(self, root: dict[str, Any], source: str) -> None:
        self._source = source
        self._root = self._guarded("its values", lambda: OmegaConf.create(_tamed(root), flags={"allow_objects": True}))

    @classmethod
    def read(cls, file: Path) -> Settings:
        """Raises CheckpointError where there is no such file, or no YAML in it."""
        if not file.exists():
            raise CheckpointError(
                f"{file.parent} has no {file.name}, which says what {file.parent.name}'s checkpoints are; copy it "
                "from where the checkpoint came"
            )
        return cls(read_yaml(file), str(file))

    def value(self, path: str, default: Any = None) -> Any:
        """The scalar or list of scalars at `path`; `default` where there is none. Raises CheckpointError."""
        node = self._at(path, default)
        parts = self._guarded(path, lambda: list(node)) if isinstance(node, ListConfig) else [node]
        if any(isinstance(part, (DictConfig, ListConfig)) for part in parts):
            raise CheckpointError(f"{self._source}: {path}: a value or a list of values is expected; correct it")
        return parts if isinstance(node, ListConfig) else node

    def section(self, path: str, known: Collection[str]) -> dict[str, Any]:
        """The mapping at `path` ({}: none), nulls left out; raises CheckpointError for a key that is not known."""
        node = self._at(path, None)
        if node is None:
            return {}
        if not isinstance(node, DictConfig):
            raise CheckpointError(f"{self._source}: {path} = {node!r}; a mapping is expected; correct it")
        if unknown := sorted(str(key) for key in node if key not in known):
            raise CheckpointError(
                f"{self._source}: {path} has unknown {', '.join(unknown)}; known: {', '.join(sorted(known))}; convert "
                "a head made with these alone"
            )
        values = {key: self.value(f"{path}.{key}") for key in map(str, node)}
        return {key: value for key, value in values.items() if value is not None}

    def _at(self, path: str, default: Any) -> Any:
        return self._guarded(path, lambda: OmegaConf.select(self._root, path, default=default, throw_on_missing=True))

    def _guarded(self, path: str, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except OmegaConfBaseException as error:
            raise CheckpointError(
                f"{self._source}: {path}: {first_line(error)}; of interpolations ${{a.b.c}} as a whole value is known; "
                "write the value itself there"
            ) from None


def _tamed(node: Any) -> Any:
    """Values that are not for OmegaConf to resolve are missing."""
    if isinstance(node, dict):
        return {key: _tamed(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_tamed(value) for value in node]
    return MISSING if isinstance(node, str) and "${" in node and not _WHOLE.fullmatch(node) else node
