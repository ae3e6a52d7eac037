"""The packaged demo: a small byte-level target, MtPC heads (one per circuit, one with a backbone), and PTP heads.

Its text is the source of the Python standard library, which every machine with Python has.
"""

import importlib.util
import sysconfig
from collections.abc import Sequence
from pathlib import Path

CIRCUITS = ("ff", "cp", "hmm", "btree")
BACKBONE = "backbone"
PTP = ("o-ptp", "c-ptp", "late")
NAMES = ("target", *CIRCUITS, BACKBONE, *PTP)
HOLDOUT = 20  # every 20th file is held out
# Tests and code of others.
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
# Configuration of the interpreter's build, with paths of its machine.
SKIPPED_PREFIX = "_sysconfigdata"
MIN_BYTES = 64


def path(name: str) -> Path:
    """Return the folder of a packaged asset: "target", a circuit, "backbone", or a PTP variant; raises ValueError."""
    if name not in NAMES:
        raise ValueError(f"demo asset {name!r} does not exist: use one of {', '.join(NAMES)}")
    return Path(__file__).resolve().parent / "assets" / name


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"{package} is not an installed package")
    return Path(spec.submodule_search_locations[0])


def texts(root: Path | None = None, packages: Sequence[str] = ()) -> list[bytes]:
    """Return the texts of Python files, by relative path.

    Args:
        root: Default: the standard library of the running interpreter.
        packages: Installed packages, whose files follow.

    Raises:
        ValueError: A package is not installed, or too few source files are found.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    roots = [root, *map(_folder, packages)]
    found = []
    for folder in roots:
        files = {file.relative_to(folder).as_posix(): file for file in folder.rglob("*.py")}
        for name in sorted(files):
            *folders, last = name.split("/")
            if not SKIPPED_FOLDERS.intersection(folders) and not last.startswith(SKIPPED_PREFIX):
                found.append(files[name].read_bytes())
    found = [text for text in found if len(text) >= MIN_BYTES]
    if len(found) < HOLDOUT:
        raise ValueError(
            f"the corpus folder {root} has {len(found)} Python files of {MIN_BYTES} bytes or more, at least {HOLDOUT} "
            "are needed: use an interpreter whose standard library is installed as source files"
        )
    return found


def held_out(found: Sequence[bytes]) -> list[bytes]:
    """Return the texts that no model was trained on."""
    return list(found[HOLDOUT - 1 :: HOLDOUT])
