"""Freed memory stays with the process, so that the large tensors of a step lie in pages that it has.

glibc gives blocks above 32 MB back to the system at once. The next step gets fresh pages, which the system fills with
zeros one by one; with thousands of ids that is a large part of a step.
"""

from __future__ import annotations

import ctypes

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # of mallopt(3)
ALL = (1 << 31) - 1


def keep_freed_memory() -> None:
    """Ask the allocator of the process for it; one without `mallopt` is left as it is."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(MMAP_MAX, 0)
        mallopt(TRIM_THRESHOLD, ALL)
