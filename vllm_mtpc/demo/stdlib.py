"""The demo's text: the source of the Python standard library, which is on every machine that can run this package."""

import importlib.util
import sysconfig
from collections.abc import Sequence
from pathlib import Path

HOLDOUT = 20  # every so many-th file is held out
# Folders that are tests or somebody else's code, and not the library's own style.
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
# The build's own configuration (paths of the machine that built the interpreter): not library text.
SKIPPED_PREFIX = "_sysconfigdata"
MIN_BYTES = 64


def texts(root: Path | None = None, packages: Sequence[str] = ()) -> list[bytes]:
    """Files in a fixed order (by relative posix path), then those of installed packages.

    root: default: the running interpreter's standard library. Raises ValueError where it has no source files.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    roots = [root, *(Path(importlib.util.find_spec(name).submodule_search_locations[0]) for name in packages)]
    found = [data for root in roots for path in _files(root) if len(data := path.read_bytes()) >= MIN_BYTES]
    if len(found) < HOLDOUT:
        raise ValueError(
            f"the corpus folder {root} has {len(found)} Python files of {MIN_BYTES} bytes or more, at least {HOLDOUT} "
            "are needed: use an interpreter whose standard library is installed as source files"
        )
    return found


def held_out(found: Sequence[bytes]) -> list[bytes]:
    """The texts that nothing is trained on."""
    return list(found[HOLDOUT - 1 :: HOLDOUT])


def _files(root: Path) -> list[Path]:
    found = []
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if not SKIPPED_FOLDERS.intersection(relative.parts[:-1]) and not path.name.startswith(SKIPPED_PREFIX):
            found.append((relative.as_posix(), path))
    return [path for _, path in sorted(found)]
