"""The packaged demo: a head of SmolLM2-135M-Instruct; a small byte-level target with an MtPC and a PTP head.

Most of the bytes' text is the source of the Python standard library, which every machine with Python has.
"""

import sysconfig
from collections.abc import Sequence
from pathlib import Path

CHAT = "smollm2"  # a head of CHAT_MODEL
CHAT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
CHAT_FOLDER = Path("models/smollm2-135m-instruct")  # of a checkout; scripts/smollm2.sh writes it
NAMES = ("target", "btree", "late", CHAT)  # a byte-level target, an MtPC and a PTP head of it
HOLDOUT = 20  # every 20th file is held out
# Tests and code of others.
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
# Configuration of the interpreter's build, with paths of its machine.
SKIPPED_PREFIX = "_sysconfigdata"
MIN_BYTES = 64


def path(name: str) -> Path:
    """Return the folder of a packaged asset; raises ValueError."""
    if name not in NAMES:
        raise ValueError(f"demo asset {name!r} does not exist: use one of {', '.join(NAMES)}")
    return Path(__file__).resolve().parent / "assets" / name


def texts(folders: Sequence[Path] = ()) -> list[bytes]:
    """Return the texts of the Python files in folders, by relative path in each of them.

    Without folders: of the standard library of the running interpreter. Raises ValueError for too few files.
    """
    folders = folders or [Path(sysconfig.get_path("stdlib"))]
    found = []
    for folder in folders:
        files = {file.relative_to(folder).as_posix(): file for file in folder.rglob("*.py")}
        for name in sorted(files):
            *parents, last = name.split("/")
            if not SKIPPED_FOLDERS.intersection(parents) and not last.startswith(SKIPPED_PREFIX):
                found.append(files[name].read_bytes())
    found = [text for text in found if len(text) >= MIN_BYTES]
    if len(found) < HOLDOUT:
        raise ValueError(
            f"the folder {folders[0]} has {len(found)} Python files of {MIN_BYTES} bytes or more, at least {HOLDOUT} "
            "are needed: use an interpreter whose standard library is installed as source files"
        )
    return found


def held_out(found: Sequence[bytes]) -> list[bytes]:
    """Return the texts that no model was trained on."""
    return list(found[HOLDOUT - 1 :: HOLDOUT])
