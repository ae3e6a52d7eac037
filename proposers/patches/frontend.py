"""Patches that run where a configuration is made: the API server, the offline engine's process.

A target that bundles a head in its `mtpc/` folder is served with it, unasked, where the user says nothing about
speculative decoding. A head that cannot be served here costs a warning and the drafts, never the target. A target that
bundles none costs one look at a path.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

from vllm_mtpc import METHODS
from vllm_mtpc.families import FAMILIES
from vllm_mtpc.proposers.config import versions
from vllm_mtpc.proposers.config.switches import AUTO, is_on, logger, warn
from vllm_mtpc.proposers.patches.patch import applied, patch, refuse_moved

ARGUMENTS = "vllm.engine.arg_utils"
MARK = "_mtpc_auto"  # attribute of EngineArgs: the head that was engaged, or None where it was given up


@patch(
    ARGUMENTS,
    "EngineArgs.create_speculative_config",
    needs=("self", "target_model_config", "target_parallel_config"),
    why="build our config class for our methods; vLLM's knows a closed list of methods",
)
def create_speculative_config(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    method = (self.speculative_config or {}).get("method") or getattr(self, "spec_method", None)
    if method in METHODS:
        made = _create(self, original, *args, **kwargs)
        logger.info("%r; vLLM attributes replaced: %s", made, ", ".join(sorted(applied)))
        return made
    refuse_misspelt(method)
    bundled = head_for(self, args[0] if args else kwargs.get("target_model_config"))
    if bundled is None:
        return original(self, *args, **kwargs)
    return engage(self, bundled, lambda: _create(self, original, *args, **kwargs))


def head_for(engine_args: Any, target: Any) -> Path | None:
    """The head that `target` (a ModelConfig) bundles, where the user has left the choice open; else None."""
    flags = ("speculative_config", "spec_method", "spec_model", "spec_tokens")
    is_chosen = any(getattr(engine_args, flag, None) is not None for flag in flags) or not is_on(AUTO, "1")
    if is_chosen or getattr(engine_args, MARK, True) is None or target is None or target.runner_type != "generate":
        return None
    folder = _folder(target.model, target.revision)
    if folder is None or not os.path.isdir(folder / "mtpc"):
        return None
    from vllm_mtpc.checkpoint.locate import bundled_heads

    try:
        return next(iter(bundled_heads(folder)), None)
    except OSError as error:  # a folder that may not be read
        warn(folder / "mtpc", error)
        return None


def engage(engine_args: Any, head: Path, create: Callable[[], Any]) -> Any:
    """What `create` makes of a speculative_config that names the head; None and a warning where it refuses."""
    from vllm_mtpc.checkpoint.locate import head_method

    engine_args.speculative_config = {"method": head_method(head) or "mtpc", "model": str(head)}
    try:
        made = create()
        made.is_bundled = True
    except Exception as error:  # whatever is wrong with the head: the target is served
        warn(head, error)
        return None
    finally:
        engine_args.speculative_config = None  # as the user gave it
    setattr(engine_args, MARK, head)
    return made


def refuse_misspelt(method: str | None) -> None:
    """Refuse a method that vLLM does not know and that is nearly one of ours."""
    from vllm.config.speculative import SpeculativeMethod

    if method is None or method in get_args(SpeculativeMethod):
        return
    from vllm_mtpc.errors import ServeConfigError, did_you_mean

    if hint := did_you_mean(str(method), METHODS):
        raise ServeConfigError(f"speculative_config: vLLM knows no method {method!r}{hint}")


def _create(engine_args: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Our config from what the user gave; the merging of flags stays vLLM's."""
    from vllm.engine import arg_utils

    from vllm_mtpc.proposers.config.refusals import of_adaptive_verification, refuse

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
        refuse(of_adaptive_verification(engine_args))
    return made


@patch(ARGUMENTS, "EngineArgs.create_engine_config", needs=("self",), why="refuse what a head cannot be served with")
def create_engine_config(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    vars(self).pop(MARK, None)  # what was decided for another configuration of these arguments
    given = dict(vars(self))  # vLLM fills in what is not given
    try:
        vllm_config = original(self, *args, **kwargs)
        spec = vllm_config.speculative_config
        if getattr(spec, "method", None) in METHODS:
            from vllm_mtpc.proposers.patches import configured

            spec.take_own_schedule()
            if spec.is_bundled:
                check_memory(vllm_config)
            spec.check_engine(vllm_config)
            configured.name_our_classes(vllm_config)
            if spec.is_bundled:
                text = "The target bundles a head, %s, which drafts from here on: %r; %s=0 turns it off"
                logger.info(text, spec.model_folder, spec, AUTO)
        return vllm_config
    except Exception as error:
        head = getattr(self, MARK, None)
        if head is None:
            if is_vllm_command():
                end_in_one_line()
            raise
        vars(self).update(given)
        setattr(self, MARK, None)  # from now on these arguments stand for the target alone
        vllm_config = original(self, *args, **kwargs)  # raises where the head was not to blame
        warn(head, error)
        return vllm_config


@patch(ARGUMENTS, "EngineArgs.add_cli_args", needs=("parser",), why="let --spec-method name our methods")
def add_cli_args(original: Callable[..., Any], parser: Any) -> Any:
    parser = original(parser)
    action = parser._option_string_actions.get("--spec-method")
    if action is not None and action.choices is not None:
        action.choices = [*action.choices, *(name for name in METHODS if name not in action.choices)]
    return parser


@patch(
    ARGUMENTS,
    "maybe_override_with_speculators",
    needs=("model", "vllm_speculative_config"),
    why="`vllm serve HEAD_FOLDER`: check the head first; its verifier may be a folder, and starts at the head",
)
def maybe_override_with_speculators(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    folder = Path(kwargs.get("model", args[0] if args else ""))
    if not is_head(folder):
        model, tokenizer, speculative_config = original(*args, **kwargs)
        check_downloaded(str(folder), kwargs.get("revision"), model, speculative_config)
        return model, tokenizer, speculative_config
    from vllm_mtpc.checkpoint import read_config, resolve_verifier

    head = read_config(folder)
    verifier = resolve_verifier(folder, head.speculators_config.verifier.name_or_path)
    given = kwargs.get("vllm_speculative_config") or {}
    return verifier, verifier, {**given, "method": head.speculators_model_type, "model": str(folder)}


@patch("vllm.config.vllm", "EagleModelTypes", why="keep asynchronous scheduling on, which is for a list of methods")
def eagle_model_types(original: Any) -> Any:
    return Literal[(original, *METHODS)]


@patch("vllm.config.vllm", "VllmConfig.num_lookahead_tokens", why="keep KV slots for the queries of a backbone")
def num_lookahead_tokens(original: property) -> property:
    def slots(config: Any) -> int:
        spec = config.speculative_config
        return spec.lookahead if getattr(spec, "method", None) in METHODS else original.__get__(config)

    return property(slots, doc=original.__doc__)


@patch(
    "vllm.config.vllm",
    "VllmConfig._maybe_disable_dynamic_sd_for_v1",
    needs=("self",),
    why="keep drafts by batch size on V1; vLLM drops them but for a list of method names",
    since=(0, 33),
)
def maybe_disable_dynamic_sd_for_v1(original: Callable[..., Any], self: Any) -> None:
    if getattr(self.speculative_config, "method", None) not in METHODS:
        original(self)


def is_head(folder: Path) -> bool:
    """Whether a folder is a head of ours; one that does not say so is only looked at, and nothing is imported."""
    try:
        with (folder / "config.json").open("rb") as file:
            if b'"speculators_model_type"' not in file.read(1 << 20):
                return False
    except OSError:
        return False
    from vllm_mtpc.checkpoint import locate

    return locate.is_head(folder)


def check_downloaded(name: str, revision: str | None, target: str, speculative_config: dict[str, Any] | None) -> None:
    """Refuse a head on the hub that names its target by a path: vLLM would look for it from the working folder."""
    if target != name and (speculative_config or {}).get("method") in METHODS:  # vLLM took the target from a head
        from vllm_mtpc.checkpoint import resolve_head, resolve_verifier

        resolve_verifier(resolve_head(name, revision), target)


def is_vllm_command() -> bool:
    """Whether this process is `vllm ...` or `python -m vllm...`, not a script that uses vLLM."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return Path(sys.argv[0]).stem == "vllm" or getattr(spec, "name", "").partition(".")[0] == "vllm"


def end_in_one_line() -> None:
    """From now on an error of ours that ends this process is printed as one line, without its traceback."""
    from vllm_mtpc.errors import MtpcError

    theirs = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, MtpcError):
            print(f"vllm: error: {error}", file=sys.stderr)
        else:
            theirs(kind, error, trace)

    sys.excepthook = excepthook


def check_memory(vllm_config: Any) -> None:
    """Refuse a head that does not fit next to its target, as far as that is known before a worker starts: the files of
    the target, the head and what drafts take. Raises ServeConfigError."""
    from vllm.platforms import current_platform

    from vllm_mtpc.proposers.config.mtpc import weights_of
    from vllm_mtpc.proposers.config.refusals import refuse

    try:
        total = current_platform.get_device_total_memory()
    except NotImplementedError:
        return
    spec, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    folder = _folder(spec.target_model_config.model, spec.target_model_config.revision)
    target = weights_of(folder) / (parallel.tensor_parallel_size * parallel.pipeline_parallel_size) if folder else 0
    head = spec.device_bytes(vllm_config)
    usable = total * vllm_config.cache_config.gpu_memory_utilization
    says = (
        f"the target's {target / 2**30:.2f} GiB, and {head / 2**30:.2f} GiB of the head and its drafts at "
        f"--max-num-seqs {vllm_config.scheduler_config.max_num_seqs}, are more than the {usable / 2**30:.2f} GiB that "
        "vLLM may take of the device; lower --max-num-seqs"
    )
    refuse({says: target + head > usable})


def _folder(model: str, revision: str | None) -> Path | None:
    """Where a target's files are: its folder, or the snapshot of a repository in the hub's cache."""
    if os.path.isdir(model):
        return Path(model)
    from huggingface_hub import try_to_load_from_cache  # vLLM has imported it

    try:
        config = try_to_load_from_cache(model, "config.json", revision=revision)
    except ValueError:  # no name of a repository: a file, an address of a cloud's storage
        return None
    return Path(config).parent if isinstance(config, str) else None
