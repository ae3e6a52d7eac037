"""Every attribute of vLLM that is replaced: one function each, listed by process at the end of this file.

A function is called in place of the attribute: its first argument is the original, the others are those of the call. If
the attribute is a class or a property, the function receives it and returns its replacement. All other additions are
subclasses of vLLM's classes, which the configuration of an engine with a head names (`engine_classes.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vllm_mtpc import METHODS
from vllm_mtpc.proposers.config.switches import AUTO, logger, warn
from vllm_mtpc.proposers.patches import engine_args
from vllm_mtpc.proposers.patches.patch import Patch, applied, apply, patch

if TYPE_CHECKING:
    from torch import Tensor

ARG_UTILS, CONFIG, LOGGERS = "vllm.engine.arg_utils", "vllm.config.vllm", "vllm.v1.metrics.loggers"


@patch(ARG_UTILS, "EngineArgs.add_cli_args", needs=("parser",), why="let --spec-method name our methods")
def add_cli_args(original: Callable[..., Any], parser: Any) -> Any:
    parser = original(parser)
    action = parser._option_string_actions.get("--spec-method")
    if action is not None and action.choices is not None:
        action.choices = [*action.choices, *(name for name in METHODS if name not in action.choices)]
    return parser


@patch(
    ARG_UTILS,
    "maybe_override_with_speculators",
    needs=("model", "vllm_speculative_config"),
    why="`vllm serve HEAD_FOLDER`: check the head first; its target may be a folder, relative to the head's",
)
def maybe_override_with_speculators(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    folder = Path(kwargs.get("model", args[0] if args else ""))
    if not engine_args.is_head(folder):
        model, tokenizer, speculative_config = original(*args, **kwargs)
        engine_args.check_downloaded(str(folder), kwargs.get("revision"), model, speculative_config)
        return model, tokenizer, speculative_config
    from vllm_mtpc.checkpoint import read_config, resolve_verifier

    head = read_config(folder)
    target = resolve_verifier(folder, head.speculators_config.verifier.name_or_path)
    given = kwargs.get("vllm_speculative_config") or {}
    return target, target, {**given, "method": head.speculators_model_type, "model": str(folder)}


@patch(
    ARG_UTILS,
    "EngineArgs.create_speculative_config",
    needs=("self", "target_model_config", "target_parallel_config"),
    why="build our config class for our methods, and for a head that the target bundles",
)
def create_speculative_config(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    method = (self.speculative_config or {}).get("method") or getattr(self, "spec_method", None)
    if method in METHODS:
        made = engine_args.create_config(self, original, *args, **kwargs)
        logger.info("%r; vLLM attributes replaced: %s", made, ", ".join(sorted(applied)))
        return made
    engine_args.refuse_misspelt(method)
    head = engine_args.find_bundled_head(self, args[0] if args else kwargs.get("target_model_config"))
    if head is None:
        return original(self, *args, **kwargs)
    return engine_args.create_bundled(self, head, lambda: engine_args.create_config(self, original, *args, **kwargs))


@patch(
    ARG_UTILS, "EngineArgs.create_engine_config", needs=("self",), why="check the engine; name our worker and scheduler"
)
def create_engine_config(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    vars(self).pop(engine_args.MARK, None)  # of another configuration made from these arguments
    given = dict(vars(self))  # vLLM sets defaults in place
    try:
        vllm_config = original(self, *args, **kwargs)
        spec = vllm_config.speculative_config
        if getattr(spec, "method", None) in METHODS:
            from vllm_mtpc.proposers.patches.engine_classes import name_our_classes

            spec.restore_own_schedule()
            spec.check_engine(vllm_config)
            name_our_classes(vllm_config)
            apply(*WITH_HEAD)
            if spec.is_bundled:
                text = "Serving with the head that the target bundles, %s: %r; %s=0 turns it off"
                logger.info(text, spec.model_folder, spec, AUTO)
        return vllm_config
    except Exception as error:
        head = getattr(self, engine_args.MARK, None)
        if head is None:
            if engine_args.is_vllm_command():
                engine_args.print_errors_in_one_line()
            raise
        vars(self).update(given)
        setattr(self, engine_args.MARK, None)  # without the head from now on
        vllm_config = original(self, *args, **kwargs)  # raises if the error is not the head's
        warn(head, error)
        return vllm_config


@patch(CONFIG, "EagleModelTypes", why="keep asynchronous scheduling, which vLLM allows a list of methods")
def eagle_model_types(original: Any) -> Any:
    return Literal[(original, *METHODS)]


@patch(CONFIG, "VllmConfig.num_lookahead_tokens", why="reserve KV slots for the queries of a backbone")
def num_lookahead_tokens(original: property) -> property:
    def slots(config: Any) -> int:
        spec = config.speculative_config
        return spec.lookahead if getattr(spec, "method", None) in METHODS else original.__get__(config)

    return property(slots, doc=original.__doc__)


@patch(
    CONFIG,
    "VllmConfig._maybe_disable_dynamic_sd_for_v1",
    needs=("self",),
    why="keep drafts by batch size on V1, which vLLM allows a list of methods",
    since=(0, 33),
)
def maybe_disable_dynamic_sd_for_v1(original: Callable[..., Any], self: Any) -> None:
    if getattr(self.speculative_config, "method", None) not in METHODS:
        original(self)


@patch(
    "vllm.v1.sample.rejection_sampler",
    "expand_batch_to_tokens",
    needs=("x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to"),
    why="vLLM's CPU kernel fills a copy of a float output, so V1 samples with uninitialised temperatures",
)
def expand_batch_to_tokens(original: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    # utils/cpu_triton_utils.py:_expand_kernel_impl (vLLM 0.31 to 0.33) converts float32 and int32 outputs to int64
    if x.is_cpu and is_broken(original):
        return expand(x, *args, **kwargs)
    return original(x, *args, **kwargs)


def expand(x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Tensor:
    """Repeat x [B] to [num_tokens], row i cu_num_tokens[i] - cu_num_tokens[i - 1] times; replace one value."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1)).long()
    if replace_from != replace_to:
        x = x.masked_fill(x == replace_from, replace_to)
    return x.repeat_interleave(counts, output_size=num_tokens)


@cache
def is_broken(original: Callable[..., Tensor]) -> bool:
    """Return whether `original` loses float values on the CPU, which a call on three tokens shows."""
    import torch

    x, counts = torch.tensor([0.25, 0.75]), torch.tensor([1, 3], dtype=torch.int32)
    try:
        return original(x, counts, 3).tolist() != [0.25, 0.75, 0.75]
    except Exception:  # a GPU build has no CPU kernel
        return False


@patch(
    "vllm.sampling_params",
    "SamplingParams._validate_spec_decode",
    needs=("self", "speculative_config"),
    why="check `mtpc_drafts`; serve without drafts the requests that vLLM refuses with drafts",
)
def validate_spec_decode(original: Callable[..., None], self: Any, speculative_config: Any) -> None:
    if getattr(speculative_config, "method", None) in METHODS:
        from vllm_mtpc.proposers.config.request_options import check_request, max_drafts

        check_request(self, speculative_config.num_speculative_tokens)
        if not max_drafts(self, 1):
            return
    original(self, speculative_config)


@patch(LOGGERS, "SpecDecodingLogging", why="log tokens/step over all steps, once a minute")
def spec_decoding_logging(original: type) -> type:
    from vllm_mtpc.proposers.patches.metrics import logging_class

    return logging_class(original)


@patch(LOGGERS, "PrometheusStatLogger._spec_decoding_cls", why="count steps and pruned drafts in /metrics")
def spec_decoding_prom(original: type) -> type:
    from vllm_mtpc.proposers.patches.metrics import prometheus_class

    return prometheus_class(original)


@patch(
    "vllm.entrypoints.launchers.app",
    "attach_endpoint_plugins",
    needs=("app", "supported_tasks"),
    why="serve POST /mtpc/head if MTPC_ALLOW_HEAD_SWAP is set; vLLM's plugins of endpoints log a warning for everybody",
)
def attach_endpoint_plugins(original: Callable[..., None], app: Any, supported_tasks: Any) -> None:
    from vllm_mtpc.proposers.patches.endpoint import HeadEndpoint

    original(app, supported_tasks)
    ours = HeadEndpoint()
    ours.attach_router(app)
    app.state.endpoint_plugins = [*app.state.endpoint_plugins, ours]


EVERY_PROCESS: tuple[Patch, ...] = (
    add_cli_args,
    maybe_override_with_speculators,
    create_speculative_config,
    create_engine_config,
    eagle_model_types,
    num_lookahead_tokens,
    maybe_disable_dynamic_sd_for_v1,
    expand_batch_to_tokens,
)
WITH_HEAD: tuple[Patch, ...] = (validate_spec_decode, spec_decoding_logging, spec_decoding_prom)
WITH_HEAD_SWAP: tuple[Patch, ...] = (attach_endpoint_plugins,)
