"""The `.bin` token files of llm.c and of the paper's authors.

256 int32 (20240520, version 1, number of tokens, zeros), then the tokens as uint16, all little-endian. nanoGPT's files
are the tokens alone.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vllm_mtpc.errors import UsageError

MAGIC, VERSION = 20240520, 1
HEADER_BYTES = 256 * 4
# Formats of this family are numbered by the day they were made on.
OTHER_MAGICS = range(20200101, 20400101)


def read_bin(path: Path) -> np.ndarray:
    """Token ids [T] uint16, memory-mapped. Raises UsageError for another format and for a truncated file."""
    size = path.stat().st_size
    header = np.fromfile(path, "<i4", 256)
    if size >= HEADER_BYTES and header[0] == MAGIC:
        if header[1] != VERSION:
            raise UsageError(f"{path}: version {header[1]} of the .bin format; only version {VERSION} is known")
        present = (size - HEADER_BYTES) / 2
        if present != header[2]:
            raise UsageError(
                f"{path}: the header says {header[2]} tokens and the file holds {present:g}; it is cut off or damaged, "
                "write it again"
            )
        offset = HEADER_BYTES
    elif len(header) == 256 and header[0] in OTHER_MAGICS and not header[8:].any():
        raise UsageError(
            f"{path}: magic number {header[0]} is not {MAGIC}; only .bin files of uint16 tokens with that number, or "
            "with no header, are read"
        )
    else:
        offset = 0
    if (size - offset) % 2:
        raise UsageError(
            f"{path}: {size} bytes are no whole number of uint16 tokens; the file is cut off, write it again"
        )
    if size == offset:
        raise UsageError(f"{path}: holds no tokens")
    return np.memmap(path, "<u2", "r", offset)


def split_at_eos(tokens: np.ndarray, eos: int | None) -> list[np.ndarray]:
    """Documents of a token file: each is led by `eos` if the file is, else each ends with it; one without an `eos`."""
    if eos is None:
        return [tokens]
    at = np.flatnonzero(tokens == eos)
    leads = tokens[0] == eos
    return [part for part in np.split(tokens, at if leads else at + 1) if len(part)]
