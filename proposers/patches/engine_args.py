"""Speculative configs made from vLLM's EngineArgs, for a head that the user names or that the target bundles.

A target with a head in its `mtpc/` folder is served with it if the user does not configure speculative decoding. If the
head cannot be served, the target is served without drafts, with one warning.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from vllm_mtpc import METHODS
from vllm_mtpc.families import FAMILIES
from vllm_mtpc.proposers.config import versions
from vllm_mtpc.proposers.config.switches import AUTO, is_on, logger, warn
from vllm_mtpc.proposers.patches.patch import refuse_moved

MARK = "_mtpc_auto"  # attribute of EngineArgs: the bundled head in use, or None after it was refused


def create_config(engine_args: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return our config for the user's options; vLLM's `create_speculative_config` merges flags and options."""
    from vllm.engine import arg_utils

    from vllm_mtpc.proposers.config.engine_checks import check_adaptive_verification

    refuse_moved()
    if warning := versions.untested_warning():
        logger.warning(warning)
    theirs = arg_utils.SpeculativeConfig
    arg_utils.SpeculativeConfig = lambda **given: FAMILIES[given["method"]].serving.create(**given)
    try:
        made = original(engine_args, *args, **kwargs)
    finally:
        arg_utils.SpeculativeConfig = theirs
    if made.enable_adaptive_verification:
        check_adaptive_verification(engine_args)
    return made


def find_bundled_head(engine_args: Any, target: Any) -> Path | None:
    """Return the head that `target` (a ModelConfig) bundles, unless the user has configured speculative decoding."""
    flags = ("speculative_config", "spec_method", "spec_model", "spec_tokens")
    is_chosen = any(getattr(engine_args, flag, None) is not None for flag in flags) or not is_on(AUTO, "1")
    if is_chosen or getattr(engine_args, MARK, True) is None or target is None or target.runner_type != "generate":
        return None
    folder = find_folder(target.model, target.revision)
    if folder is None or not os.path.isdir(folder / "mtpc"):
        return None
    from vllm_mtpc.checkpoint.locate import bundled_heads

    try:
        return next(iter(bundled_heads(folder)), None)
    except OSError as error:
        warn(folder / "mtpc", error)
        return None


def create_bundled(engine_args: Any, head: Path, create: Callable[[], Any]) -> Any:
    """Return the config for a bundled head; warn and return None if it is refused."""
    from vllm_mtpc.checkpoint.locate import head_method

    engine_args.speculative_config = {"method": head_method(head) or "mtpc", "model": str(head)}
    try:
        made = create()
        made.is_bundled = True
    except Exception as error:
        warn(head, error)
        return None
    finally:
        engine_args.speculative_config = None  # as the user gave it
    setattr(engine_args, MARK, head)
    return made


def is_head(folder: Path) -> bool:
    """Return whether a folder is a head; other folders cost one look at `config.json` and no import."""
    try:
        with (folder / "config.json").open("rb") as file:
            if b'"speculators_model_type"' not in file.read(1 << 20):
                return False
    except OSError:
        return False
    from vllm_mtpc.checkpoint import locate

    return locate.is_head(folder)


def check_downloaded(name: str, revision: str | None, target: str, speculative_config: dict[str, Any] | None) -> None:
    """Raise CheckpointError for a head on the hub that names its target by a path on this machine."""
    if target != name and (speculative_config or {}).get("method") in METHODS:
        from vllm_mtpc.checkpoint import resolve_head, resolve_verifier

        resolve_verifier(resolve_head(name, revision), target)


def find_folder(model: str, revision: str | None) -> Path | None:
    """Return a target's folder, or its snapshot in the hub's cache; None if it is not on this machine."""
    if os.path.isdir(model):
        return Path(model)
    from huggingface_hub import try_to_load_from_cache

    try:
        config = try_to_load_from_cache(model, "config.json", revision=revision)
    except ValueError:  # a file, or an address of cloud storage
        return None
    return Path(config).parent if isinstance(config, str) else None


def is_vllm_command() -> bool:
    """Return whether this process is `vllm ...` or `python -m vllm...`, not a script that uses vLLM."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return Path(sys.argv[0]).stem == "vllm" or getattr(spec, "name", "").partition(".")[0] == "vllm"


def print_errors_in_one_line() -> None:
    """Print an MtpcError that ends this process as one line, without a traceback."""
    from vllm_mtpc.errors import MtpcError

    original = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, MtpcError):
            print(f"vllm: error: {error}", file=sys.stderr)
        else:
            original(kind, error, trace)

    sys.excepthook = excepthook
