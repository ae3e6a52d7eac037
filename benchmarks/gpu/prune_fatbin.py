"""Zero the GPU code of other architectures in shared libraries, which keep their layout and compress to less.

    python benchmarks/gpu/prune_fatbin.py 90 LIBRARY ...

nvcc writes a fatbin container for each source file: a magic number, the size of its header, that of its entries, and
the entries. The header of an entry has its kind (PTX or SASS), its own size, that of the payload after it, and the
architecture. The CUDA driver reads the payload for its GPU. PTX is kept in a container without SASS to keep.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path

MAGIC = struct.pack("<IHH", 0xBA55ED50, 1, 16)  # number, version, size of the header
CONTAINER, ENTRY = struct.Struct("<8xQ"), struct.Struct("<HHIQ12xI")
PTX, SASS = 1, 2


def prune(data: bytearray, keep: int) -> int:
    """Zero and count the bytes of architectures other than `keep`; raises ValueError for an unknown layout."""
    start, zeroed = data.find(MAGIC), 0
    while start >= 0:
        at, payloads = start + CONTAINER.size, []
        end = at + CONTAINER.unpack_from(data, start)[0]
        while at + ENTRY.size <= end <= len(data):
            kind, _, header, size, architecture = ENTRY.unpack_from(data, at)
            payloads.append((kind, architecture, slice(at + header, at + header + size)))
            at += max(header, ENTRY.size) + size
        if at != end:
            raise ValueError(f"the fatbin container at byte {start} is damaged or has another layout: do not prune it")
        has_sass = any((kind, architecture) == (SASS, keep) for kind, architecture, _ in payloads)
        for kind, architecture, payload in payloads:
            if has_sass if kind == PTX else architecture != keep:
                data[payload] = bytes(payload.stop - payload.start)
                zeroed += payload.stop - payload.start
        start = data.find(MAGIC, end)
    return zeroed


if __name__ == "__main__":
    for library in map(Path, sys.argv[2:]):
        content = bytearray(library.read_bytes())
        print(f"{library.name}: {prune(content, int(sys.argv[1])):,} of {len(content):,} bytes zeroed")
        library.write_bytes(content)
