"""Attributes of vLLM that are replaced for heads: one function each, listed by process at the end of this file.

A function is called with the original and the arguments of the call; a class or a property is replaced by its result.
A target with a head in its `mtpc/` folder is served with it if the user does not configure speculative decoding. If the
head does not fit the target or the engine, the target is served without drafts, with one warning.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from vllm_mtpc import METHODS
from vllm_mtpc.families import FAMILIES
from vllm_mtpc.proposers.options import versions
from vllm_mtpc.proposers.options.switches import AUTO, is_on, logger, warn
from vllm_mtpc.proposers.patches.patch import Patch, applied, apply, patch, refuse_moved

if TYPE_CHECKING:
    from torch import Tensor

ARG_UTILS, CONFIG, LOGGERS = "vllm.engine.arg_utils", "vllm.config.vllm", "vllm.v1.metrics.loggers"
MARK = "_mtpc_auto"  # attribute of EngineArgs: the bundled head in use, or None after it was refused


@patch(ARG_UTILS, "maybe_override_with_speculators", needs=("model", "vllm_speculative_config"))
def maybe_override_with_speculators(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Serve `vllm serve HEAD_FOLDER`: check the head first; its target may be a folder, relative to the head's."""
    folder = Path(kwargs.get("model", args[0] if args else ""))
    if not is_head(folder):
        model, tokenizer, speculative_config = original(*args, **kwargs)
        if model != str(folder) and (speculative_config or {}).get("method") in METHODS:
            from vllm_mtpc.checkpoint import resolve_head, resolve_verifier

            # raises for a head on the hub that names its target by a path on this machine
            resolve_verifier(resolve_head(str(folder), kwargs.get("revision")), model)
        return model, tokenizer, speculative_config
    from vllm_mtpc.checkpoint import read_config, resolve_verifier

    head = read_config(folder)
    target = resolve_verifier(folder, head.speculators_config.verifier.name_or_path)
    given = kwargs.get("vllm_speculative_config") or {}
    return target, target, {**given, "method": head.speculators_model_type, "model": str(folder)}


@patch(ARG_UTILS, "EngineArgs.add_cli_args", needs=("parser",))
def add_cli_args(original: Callable[..., Any], parser: Any) -> Any:
    """Allow `--spec-method mtpc`, which argparse refuses: vLLM's config has a closed list of methods."""
    parser = original(parser)
    for action in parser._actions:
        if action.dest == "spec_method" and action.choices:
            action.choices = [*action.choices, *METHODS]
    return parser


@patch(ARG_UTILS, "EngineArgs.create_speculative_config", ("self", "target_model_config", "target_parallel_config"))
def create_speculative_config(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Build our config class for our methods, and for a head that the target bundles."""
    method = find_method(self)
    if method in METHODS:
        made = create_config(self, original, *args, **kwargs)
        logger.info("%r; vLLM attributes replaced: %s", made, ", ".join(sorted(applied)))
        return made
    head = find_bundled_head(self, args[0] if args else kwargs.get("target_model_config"))
    if head is None:
        return original(self, *args, **kwargs)
    from vllm_mtpc.checkpoint.locate import head_method

    self.speculative_config = {"method": head_method(head) or "mtpc", "model": str(head)}
    try:
        made = create_config(self, original, *args, **kwargs)
    except Exception as error:
        warn(head, error)
        return None
    finally:
        self.speculative_config = None  # as the user gave it
    setattr(self, MARK, head)
    return made


@patch(ARG_UTILS, "EngineArgs.create_engine_config", needs=("self",))
def create_engine_config(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Check the engine, and name our worker and scheduler."""
    vars(self).pop(MARK, None)  # of another configuration made from these arguments
    given = dict(vars(self))  # vLLM sets defaults in place
    try:
        vllm_config = original(self, *args, **kwargs)
        spec = vllm_config.speculative_config
        if getattr(spec, "method", None) in METHODS:
            from vllm_mtpc.proposers.patches.scheduler import HeadSchedulerConfig
            from vllm_mtpc.proposers.worker.derive import extend_object

            spec.restore_own_schedule()
            spec.check_engine(vllm_config)
            parallel = vllm_config.parallel_config  # worker.py derives a worker from each of vLLM's, by its name
            parallel.worker_cls = f"vllm_mtpc.proposers.patches.worker.{parallel.worker_cls.replace('.', ':')}"
            extend_object(vllm_config.scheduler_config, HeadSchedulerConfig)
            apply(*WITH_HEAD)
            if getattr(self, MARK, None):
                text = "Serving with the head that the target bundles, %s: %r; %s=0 turns it off"
                logger.info(text, spec.model_folder, spec, AUTO)
        return vllm_config
    except Exception as error:
        head = getattr(self, MARK, None)
        if head is None:
            print_errors_in_one_line()
            raise
        vars(self).update(given)
        setattr(self, MARK, None)  # without the head from now on
        vllm_config = original(self, *args, **kwargs)  # raises if the error is not the head's
        warn(head, error)
        return vllm_config


@patch(CONFIG, "EagleModelTypes")
def eagle_model_types(original: Any) -> Any:
    """Keep asynchronous scheduling, which vLLM allows for a list of methods only."""
    return Literal[(original, *METHODS)]


@patch(CONFIG, "VllmConfig.num_lookahead_tokens")
def num_lookahead_tokens(original: property) -> property:
    """Reserve KV slots for the queries of a backbone or a hosted drafter."""

    def slots(config: Any) -> int:
        spec = config.speculative_config
        if getattr(spec, "method", None) not in METHODS:
            return original.__get__(config)
        return spec.lookahead

    return property(slots, doc=original.__doc__)


@patch(CONFIG, "VllmConfig._maybe_disable_dynamic_sd_for_v1", needs=("self",), since=(0, 33))
def maybe_disable_dynamic_sd_for_v1(original: Callable[..., Any], self: Any) -> None:
    """Keep drafts by batch size on V1, which vLLM 0.33 allows for a list of methods only."""
    if getattr(self.speculative_config, "method", None) not in METHODS:
        original(self)


@patch(
    "vllm.v1.sample.rejection_sampler",
    "expand_batch_to_tokens",
    needs=("x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to"),
)
def expand_batch_to_tokens(original: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Fill float outputs on a CPU, where vLLM's kernel fills a copy and V1 samples with uninitialised temperatures."""
    return (expand if x.is_cpu else original)(x, *args, **kwargs)


def expand(x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Tensor:
    """Repeat x [B] to [num_tokens], row i cu_num_tokens[i] - cu_num_tokens[i - 1] times; replace one value."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1)).long()
    if replace_from != replace_to:
        x = x.masked_fill(x == replace_from, replace_to)
    return x.repeat_interleave(counts, output_size=num_tokens)


@patch("vllm.sampling_params", "SamplingParams._validate_spec_decode", needs=("self", "speculative_config"))
def validate_spec_decode(original: Callable[..., None], self: Any, speculative_config: Any) -> None:
    """Check `mtpc_drafts`; serve without drafts the requests that vLLM refuses with drafts."""
    if getattr(speculative_config, "method", None) in METHODS:
        from vllm_mtpc.proposers.options.request_options import check_request, max_drafts

        check_request(self, speculative_config.num_speculative_tokens)
        if not max_drafts(self, 1):
            return
    original(self, speculative_config)


@patch(LOGGERS, "SpecDecodingLogging")
def spec_decoding_logging(original: type) -> type:
    """Log tokens/step over all steps, once a minute."""
    from vllm_mtpc.proposers.worker.counts import logging_class

    return logging_class(original)


@patch(LOGGERS, "PrometheusStatLogger._spec_decoding_cls")
def spec_decoding_prom(original: type) -> type:
    """Count steps and pruned drafts in /metrics."""
    from vllm_mtpc.proposers.worker.counts import prometheus_class

    return prometheus_class(original)


@patch("vllm.v1.metrics.ray_wrappers", "RayPrometheusStatLogger._spec_decoding_cls")
def ray_spec_decoding_prom(original: type) -> type:
    """Count them in Ray's metrics, for which vLLM has a class of its own."""
    return spec_decoding_prom.function(original)


@patch("vllm.v1.worker.gpu.model_runner", "init_speculator", needs=("vllm_config", "device"))
def init_speculator(original: Callable[..., Any], vllm_config: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
    """Build our speculator; vLLM's factory has a closed list. Applied in a worker of Model Runner V2."""
    if vllm_config.speculative_config.method not in METHODS:
        return original(vllm_config, device, *args, **kwargs)
    from vllm_mtpc.proposers.v2.model_runner_v2 import speculator_class

    return speculator_class(vllm_config.speculative_config)(vllm_config, device)


def create_config(engine_args: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return our config for the user's options; vLLM's `create_speculative_config` merges flags and options."""
    from vllm.engine import arg_utils

    refuse_moved()
    if warning := versions.untested_warning():
        logger.warning(warning)
    theirs = arg_utils.SpeculativeConfig
    arg_utils.SpeculativeConfig = lambda **given: FAMILIES[given["method"]].serving.create(**given)
    try:
        return original(engine_args, *args, **kwargs)
    finally:
        arg_utils.SpeculativeConfig = theirs


def find_method(engine_args: Any) -> str | None:
    """Return the method that the user typed, or that of the head that `model` names; without either None.

    A method that was not typed is added to the options; vLLM only finds those of its own draft models.
    """
    options = engine_args.speculative_config or {}
    method, model = options.get("method") or engine_args.spec_method, options.get("model") or engine_args.spec_model
    if method or not model:
        return method
    from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

    try:
        config = get_hf_file_to_dict("config.json", os.path.expanduser(model), options.get("revision")) or {}
    except Exception:  # vLLM reads the same file next, and reports the error
        return None
    method = config.get("speculators_model_type")
    if method in METHODS:
        engine_args.speculative_config = {**options, "method": method}
    return method


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


def print_errors_in_one_line() -> None:
    """Print an MtpcError that ends a process of `vllm ...` or `python -m vllm...` as one line, without a traceback."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if Path(sys.argv[0]).stem != "vllm" and getattr(spec, "name", "").partition(".")[0] != "vllm":
        return  # a script that uses vLLM
    from vllm_mtpc.errors import MtpcError

    original = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, MtpcError):
            print(f"vllm: error: {error}", file=sys.stderr)
        else:
            original(kind, error, trace)

    sys.excepthook = excepthook


EVERY_PROCESS: tuple[Patch, ...] = (
    maybe_override_with_speculators,
    add_cli_args,
    create_speculative_config,
    create_engine_config,
    eagle_model_types,
    num_lookahead_tokens,
    maybe_disable_dynamic_sd_for_v1,
    expand_batch_to_tokens,
)
WITH_HEAD: tuple[Patch, ...] = (
    validate_spec_decode,
    spec_decoding_logging,
    spec_decoding_prom,
    ray_spec_decoding_prom,
    init_speculator,
)
