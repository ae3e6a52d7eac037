"""config.yaml of an MtPC run: YAML with the interpolations OmegaConf leaves in it, looked up where they are asked for.

Known is `${a.b.c}`, a path from the root, as a whole value or inside a string. Everything else OmegaConf has (`${.a}`,
`${oc.env:A}`, `${a.${b}}`, missing values `???`) is refused by name, if and only if a value that is asked for needs it.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from vllm_mtpc.errors import CheckpointError
from vllm_mtpc.files import read_yaml

MAX_DEPTH = 16  # of references and of nesting; deeper ones go in circles
MAX_WORK = 100_000  # nodes and characters looked at: references to references can stand for any number of them
_REFERENCE = re.compile(r"\$\{([^{}]*)\}")
_PATH = re.compile(r"[A-Za-z_][\w-]*(?:\.[\w-]+)*")


class Settings:
    """The values of a config.yaml by dotted path."""

    def __init__(self, root: dict[str, Any], source: str) -> None:
        self._root = root
        self._source = source
        self._left = MAX_WORK

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
        """The value at `path`, interpolations resolved; `default` where there is none."""
        return self._at(path, default, 0)

    def section(self, path: str, known: Collection[str]) -> dict[str, Any]:
        """The mapping at `path` ({}: none), nulls left out; raises CheckpointError for a key that is not known."""
        node = self.value(path)
        if node is None:
            return {}
        if not isinstance(node, dict):
            raise CheckpointError(f"{self._source}: {path} = {node!r}; a mapping is expected; correct it")
        if unknown := sorted(str(key) for key in node if key not in known):
            raise CheckpointError(
                f"{self._source}: {path} has unknown {', '.join(unknown)}; known: {', '.join(sorted(known))}; convert "
                "a head made with these alone"
            )
        return {key: value for key, value in node.items() if value is not None}

    def _at(self, path: str, default: Any, depth: int) -> Any:
        node = self._root
        for key in path.split("."):
            node = self._resolved(node, depth, deep=False)
            if not isinstance(node, dict) or key not in node:
                return default
            node = node[key]
        return self._resolved(node, depth, deep=True)

    def _resolved(self, node: Any, depth: int, deep: bool) -> Any:
        """`node` with its references replaced; those inside a mapping or list only if `deep`."""
        if depth > MAX_DEPTH:
            raise CheckpointError(f"{self._source}: references or mappings more than {MAX_DEPTH} deep; correct them")
        self._spend(1 + len(node) if isinstance(node, str) else 1)
        if isinstance(node, str):
            return self._text(node, depth)
        if deep and isinstance(node, dict):
            return {key: self._resolved(value, depth + 1, deep) for key, value in node.items()}
        if deep and isinstance(node, list):
            return [self._resolved(value, depth + 1, deep) for value in node]
        return node

    def _text(self, text: str, depth: int) -> Any:
        if text == "???":
            raise CheckpointError(f"{self._source}: a value is missing ('???'); fill it in")
        if whole := _REFERENCE.fullmatch(text):
            return self._reference(whole[1], depth)
        if "${" in _REFERENCE.sub("", text) or "\\${" in text:
            raise CheckpointError(f"{self._source}: {text!r}: only ${{a.b.c}} is known; write its value there")
        return _REFERENCE.sub(lambda match: self._spend_on(str(self._reference(match[1], depth))), text)

    def _reference(self, path: str, depth: int) -> Any:
        if not _PATH.fullmatch(path):
            raise CheckpointError(f"{self._source}: '${{{path}}}': only ${{a.b.c}} is known; write its value there")
        missing = object()
        if (value := self._at(path, missing, depth + 1)) is missing:
            raise CheckpointError(f"{self._source}: '${{{path}}}' names nothing in the file; write its value there")
        return value

    def _spend(self, work: int) -> None:
        self._left -= work
        if self._left < 0:
            raise CheckpointError(f"{self._source}: its references stand for too much; write out the values themselves")

    def _spend_on(self, text: str) -> str:
        self._spend(len(text))
        return text
