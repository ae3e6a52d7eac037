"""What a name on the command line means: a path (file, folder, glob), or a name of the hub or `datasets` library."""

from __future__ import annotations

import glob
from pathlib import Path

FOLDER_SUFFIXES = frozenset({".txt", ".md", ".py", ".jsonl"})
DATASET_SUFFIXES = frozenset({".parquet", ".arrow", ".csv"})  # a folder of these is for the datasets library
_SUFFIXES = FOLDER_SUFFIXES | DATASET_SUFFIXES | {".bin", ".json"}


def is_path(name: str) -> bool:
    """Whether a name is of a file, folder or glob, there or not."""
    path = Path(name).expanduser()
    return path.exists() or glob.has_magic(name) or path.suffix in _SUFFIXES or name.startswith(("/", ".", "~"))


def resolved(name: str) -> str:
    """The same name whatever folder it is read in: a path or glob in full, any other name as it is."""
    return str(Path(name).expanduser().resolve()) if is_path(name) else name
