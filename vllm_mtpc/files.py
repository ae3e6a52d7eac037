"""Read untrusted files (heads, checkpoints, targets) within bounds, and replace our own files atomically.

Only regular files are opened, so no read waits for a pipe or a device. Sizes and nesting are limited before memory is
allocated.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_mtpc.errors import CheckpointError, first_line

MAX_JSON = 1 << 18  # bytes; a head's config.json and provenance.json have some 10 KB
MAX_INDEX = 16 << 20  # of the index of a target's shards: a line per tensor
MAX_YAML = 1 << 15  # PyYAML reads some 0.2 MB/s; the settings of a run have a few KB
MAX_HEADER = 8 << 20  # of a safetensors file: a line per tensor
MAX_DEPTH = 32  # of nested objects and lists


def read_text(file: Path, limit: int) -> str:
    """Return the text of a file of at most `limit` bytes; raises CheckpointError."""
    try:
        data = _read(file, limit + 1)
        if len(data) > limit:
            raise OSError(f"more than {limit:,} bytes, the most that is allowed")
        return data.decode()
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or no path at all
        reason = getattr(error, "strerror", None) or first_line(error)
        raise CheckpointError(f"{file}: cannot be read ({reason}); copy it again, or name another folder") from None


def read_json(file: Path, limit: int = MAX_JSON) -> dict[str, Any]:
    """Return the JSON object in a file, with NaN and infinities as strings. Raises CheckpointError."""
    text = read_text(file, limit)
    try:
        values = json.loads(text, parse_constant=str)
    except (ValueError, RecursionError) as error:  # ValueError: not JSON, endless digits
        raise CheckpointError(f"{file}: cannot be read as JSON ({first_line(error)}); copy it again") from None
    return _mapping(file, values, "a JSON object")


def read_yaml(file: Path) -> dict[str, Any]:
    """Return the YAML mapping in a file. Raises CheckpointError, also for aliases, which may expand without limit."""
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise ValueError(f"alias *{self.peek_event().anchor}: write out its value")
            return super().compose_node(parent, index)

    text = read_text(file, MAX_YAML)
    try:
        values = yaml.load(text, Loader)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise CheckpointError(f"{file}: cannot be read as YAML ({error}); copy it again") from None
    return _mapping(file, values, "a mapping")


@contextmanager
def replacing(*paths: Path) -> Iterator[list[Path]]:
    """Yield temporary files that replace `paths`, in order, at the end of the block.

    A reader sees an old or a new file, never an incomplete one. If the block fails, the old files remain. A symbolic
    link under a temporary name is removed, not followed.
    """
    unfinished = [path.with_name(f"{path.name}.partial") for path in paths]
    try:
        for file in unfinished:
            file.unlink(missing_ok=True)  # left by a process that was killed
            os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY, 0o666))
        yield unfinished
        for file in unfinished:
            with open(file, "rb") as written:
                os.fsync(written.fileno())
        for file, path in zip(unfinished, paths, strict=True):
            os.replace(file, path)
    finally:
        for file in unfinished:
            file.unlink(missing_ok=True)


def replace_file(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically."""
    with replacing(path) as (file,):
        file.write_bytes(data)


@contextmanager
def open_tensors(file: Path) -> Iterator[Any]:
    """Open a safetensors file memory-mapped. Raises CheckpointError, also while it is read."""
    from safetensors import SafetensorError, safe_open

    try:
        size = int.from_bytes(_read(file, 8), "little")
        if size > MAX_HEADER:
            raise SafetensorError(f"a header of {size:,} bytes; allowed: {MAX_HEADER:,}")
        with safe_open(str(file), framework="pt") as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise CheckpointError(f"{file}: not a readable safetensors file ({reason}); copy the head again") from None


def _read(file: Path, size: int) -> bytes:
    """Return the first `size` bytes of a regular file; raises OSError."""
    if not stat.S_ISREG(os.stat(file).st_mode):
        raise OSError("not a regular file")
    with open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as opened:
        return opened.read(size) or b""  # None for some files of /proc


def _mapping(file: Path, values: Any, expected: str) -> dict[str, Any]:
    """Return `values` if they are a mapping that is nested within bounds."""
    if not isinstance(values, dict):
        raise CheckpointError(f"{file}: holds a {type(values).__name__}; {expected} is expected; copy it again")
    level: list[Any] = [values]
    for _ in range(MAX_DEPTH):
        parts = [node.values() if isinstance(node, dict) else node for node in level if isinstance(node, (dict, list))]
        level = [part for group in parts for part in group]
    if level:
        raise CheckpointError(f"{file}: objects nested more than {MAX_DEPTH} deep; copy it again")
    return values
