"""Freed memory is used again: page faults of a second block of the same size, in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

BLOCK = """
import resource
from vllm_mtpc.train.memory import keep_freed_memory
{call}
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = b"1" * (1 << 26)
    del block
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = (1 << 26) >> 12  # of a block, where pages have 4 KiB
HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(not HUGE.exists() or "[always]" in HUGE.read_text(), reason="glibc's allocator, pages of 4 KiB")
def test_second_block_of_a_size_has_no_new_pages():
    faults = [
        int(subprocess.run([sys.executable, "-c", BLOCK.format(call=call)], capture_output=True, check=True).stdout)
        for call in ("keep_freed_memory()", "")
    ]
    assert faults[0] < PAGES // 10
    assert faults[1] > PAGES // 10  # without it: the test can fail
