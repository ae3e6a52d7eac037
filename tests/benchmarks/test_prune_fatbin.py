"""benchmarks/gpu/prune_fatbin.py, on libraries that are made up."""

from __future__ import annotations

import struct

import pytest

from benchmarks.gpu.prune_fatbin import MAGIC, PTX, SASS, prune


def entry(kind: int, architecture: int, fill: int) -> bytes:
    header = struct.pack("<HHIQ12xI", kind, 0x101, 64, 24, architecture)
    return header.ljust(64, b"\x05") + bytes([fill]) * 24


def library(*containers: tuple[bytes, ...]) -> bytearray:
    packed = (MAGIC + struct.pack("<Q", len(b"".join(entries))) + b"".join(entries) for entries in containers)
    return bytearray(b"\x7fELF" + b"\x02" * 20 + (b"\x03" * 8).join(packed) + b"\x04" * 20)


def test_prune_zeroes_code_of_other_architectures_and_nothing_else() -> None:
    def made(other: int, ptx: int) -> bytearray:
        both = entry(SASS, 80, other), entry(SASS, 90, 2), entry(PTX, 90, ptx), entry(SASS, 90, 4)
        return library(both, (entry(SASS, 80, other), entry(PTX, 80, 6)))  # the PTX is all that the second has for 90

    data = made(1, 3)
    assert prune(data, 90) == 3 * 24 and data == made(0, 0)
    assert prune(data, 90) == 3 * 24 and data == made(0, 0)


def test_prune_refuses_a_container_of_another_layout() -> None:
    data = library((entry(SASS, 80, 1),))
    data[4 + 20 + 8] += 8  # the size of the entries
    with pytest.raises(ValueError, match="container at byte 24"):
        prune(data, 90)
