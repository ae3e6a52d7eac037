"""Every attribute of vLLM that is replaced: one function each, listed by process at the end of this file.

A function is called in place of the attribute: its first argument is the original, the others are those of the call. If
the attribute is a class or a property, the function receives it and returns its replacement. All other additions are
subclasses of vLLM's classes, which the configuration of an engine with a head names (`scheduler.py`, `worker.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vllm_mtpc import METHODS
from vllm_mtpc.proposers.config.switches import AUTO, logger, warn
from vllm_mtpc.proposers.patches import engine_args
from vllm_mtpc.proposers.patches.patch import Patch, applied, apply, patch

if TYPE_CHECKING:
    from torch import Tensor

ARG_UTILS, CONFIG, LOGGERS = "vllm.engine.arg_utils", "vllm.config.vllm", "vllm.v1.metrics.loggers"


@patch(ARG_UTILS, "EngineArgs.add_cli_args", needs=("parser",))
def add_cli_args(original: Callable[..., Any], parser: Any) -> Any:
    """Let --spec-method name our methods."""
    parser = original(parser)
    action = parser._option_string_actions.get("--spec-method")
    if action is not None and action.choices is not None:
        action.choices = [*action.choices, *(name for name in METHODS if name not in action.choices)]
    return parser


@patch(ARG_UTILS, "maybe_override_with_speculators", needs=("model", "vllm_speculative_config"))
def maybe_override_with_speculators(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Serve `vllm serve HEAD_FOLDER`: check the head first; its target may be a folder, relative to the head's."""
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


@patch(ARG_UTILS, "EngineArgs.create_speculative_config", ("self", "target_model_config", "target_parallel_config"))
def create_speculative_config(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Build our config class for our methods, and for a head that the target bundles."""
    method = (self.speculative_config or {}).get("method") or getattr(self, "spec_method", None)
    if method in METHODS:
        made = engine_args.create_config(self, original, *args, **kwargs)
        logger.info("%r; vLLM attributes replaced: %s", made, ", ".join(sorted(applied)))
        return made
    head = engine_args.find_bundled_head(self, args[0] if args else kwargs.get("target_model_config"))
    if head is None:
        return original(self, *args, **kwargs)
    return engine_args.create_bundled(self, head, lambda: engine_args.create_config(self, original, *args, **kwargs))


@patch(ARG_UTILS, "EngineArgs.create_engine_config", needs=("self",))
def create_engine_config(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Check the engine, and name our worker and scheduler."""
    vars(self).pop(engine_args.MARK, None)  # of another configuration made from these arguments
    given = dict(vars(self))  # vLLM sets defaults in place
    try:
        vllm_config = original(self, *args, **kwargs)
        spec = vllm_config.speculative_config
        if getattr(spec, "method", None) in METHODS:
            from vllm_mtpc.proposers.patches.scheduler import HeadSchedulerConfig

            spec.restore_own_schedule()
            spec.check_engine(vllm_config)
            parallel = vllm_config.parallel_config  # worker.py derives a worker from each of vLLM's, by its name
            parallel.worker_cls = f"vllm_mtpc.proposers.patches.worker.{parallel.worker_cls.replace('.', ':')}"
            vllm_config.scheduler_config.__class__ = HeadSchedulerConfig
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


@patch(CONFIG, "EagleModelTypes")
def eagle_model_types(original: Any) -> Any:
    """Keep asynchronous scheduling, which vLLM allows a list of methods."""
    return Literal[(original, *METHODS)]


@patch(CONFIG, "VllmConfig.num_lookahead_tokens")
def num_lookahead_tokens(original: property) -> property:
    """Reserve KV slots for the queries of a backbone."""

    def slots(config: Any) -> int:
        spec = config.speculative_config
        if getattr(spec, "method", None) not in METHODS:
            return original.__get__(config)
        return spec.head.window if spec.has_backbone else 0

    return property(slots, doc=original.__doc__)


@patch(CONFIG, "VllmConfig._maybe_disable_dynamic_sd_for_v1", needs=("self",), since=(0, 33))
def maybe_disable_dynamic_sd_for_v1(original: Callable[..., Any], self: Any) -> None:
    """Keep drafts by batch size on V1, which vLLM 0.33 allows a list of methods."""
    if getattr(self.speculative_config, "method", None) not in METHODS:
        original(self)


@patch(
    "vllm.v1.sample.rejection_sampler",
    "expand_batch_to_tokens",
    needs=("x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to"),
)
def expand_batch_to_tokens(original: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Fill float outputs on a CPU, where vLLM's kernel fills a copy and V1 samples with uninitialised temperatures.

    utils/cpu_triton_utils.py:_expand_kernel_impl (vLLM 0.31 to 0.33) converts float32 and int32 outputs to int64.
    """
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
        from vllm_mtpc.proposers.config.request_options import check_request, max_drafts

        check_request(self, speculative_config.num_speculative_tokens)
        if not max_drafts(self, 1):
            return
    original(self, speculative_config)


@patch(LOGGERS, "SpecDecodingLogging")
def spec_decoding_logging(original: type) -> type:
    """Log tokens/step over all steps, once a minute."""
    from vllm_mtpc.proposers.patches.metrics import logging_class

    return logging_class(original)


@patch(LOGGERS, "PrometheusStatLogger._spec_decoding_cls")
def spec_decoding_prom(original: type) -> type:
    """Count steps and pruned drafts in /metrics."""
    from vllm_mtpc.proposers.patches.metrics import prometheus_class

    return prometheus_class(original)


@patch("vllm.entrypoints.launchers.app", "attach_endpoint_plugins", needs=("app", "supported_tasks"))
def attach_endpoint_plugins(original: Callable[..., None], app: Any, supported_tasks: Any) -> None:
    """Serve POST /mtpc/head; vLLM's own plugins of endpoints log a warning in every server."""
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
