"""A file of answers that grows line by line, and one beside it with the settings; a resumed run skips what is there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from vllm_mtpc.errors import UsageError
from vllm_mtpc.files import read_json, replace_file


def encode(answer: dict[str, Any]) -> bytes:
    """Return the line of a file of answers."""
    return (json.dumps(answer, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")


def resume(path: Path, settings: dict[str, Any]) -> set[str]:
    """Return the ids in a file of answers, and remove its incomplete last line; a new file gets its settings.

    Args:
        path: of the file; PATH.meta.json has its settings.
        settings: JSON values that the answers depend on.

    Raises:
        UsageError: the file was made with other settings, or has a line that is no answer.
    """
    from vllm_mtpc.checkpoint.save import package_versions

    side = path.with_name(path.name + ".meta.json")
    if not path.exists() or not path.stat().st_size:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(side, (json.dumps({**settings, "versions": package_versions()}, indent=2) + "\n").encode())
        return set()
    if not side.exists():
        raise UsageError(f"{path} is there without {side.name}; name another file, or remove it")
    given = read_json(side)
    if found := [name for name, value in settings.items() if given.get(name) != value]:
        differing = ", ".join(f"{name} {given.get(name)!r} (asked for: {settings[name]!r})" for name in found)
        raise UsageError(
            f"{path} was made with other settings: {differing}; give the same ones to continue it, or name another file"
        )
    ids, end = set(), 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            end += len(line)
            try:
                ids.add(json.loads(line)["id"])
            except (ValueError, TypeError, KeyError):
                raise UsageError(f"{path}:{number}: not a response; remove the line and run again") from None
    os.truncate(path, end)
    return ids
