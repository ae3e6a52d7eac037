"""Patches that run where a configuration is made: the API server, the offline engine's process."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

from vllm_mtpc import METHODS
from vllm_mtpc.proposers.seam import auto
from vllm_mtpc.proposers.seam.patch import Patch, applied, refuse_problems

logger = logging.getLogger("vllm.mtpc")


class CreateSpeculativeConfig(Patch):
    module = "vllm.engine.arg_utils"
    attribute = "EngineArgs.create_speculative_config"
    reason = "build our config class for our methods; vLLM's knows a closed list of methods"
    parameters = ("self", "target_model_config", "target_parallel_config")

    @classmethod
    def replace(cls, original: Callable[..., Any]) -> Callable[..., Any]:
        def create_speculative_config(self: Any, *args: Any, **kwargs: Any) -> Any:
            method = (self.speculative_config or {}).get("method") or getattr(self, "spec_method", None)
            if method in METHODS:
                made = _create(self, original, *args, **kwargs)
                logger.info("%r; vLLM attributes replaced: %s", made, ", ".join(sorted(applied)))
                return made
            refuse_misspelt(method)
            target = args[0] if args else kwargs.get("target_model_config")
            shipped = auto.head_for(self, target)
            if shipped is None:
                return original(self, *args, **kwargs)
            return auto.engage(self, shipped, lambda: _create(self, original, *args, **kwargs))

        return create_speculative_config


def refuse_misspelt(method: str | None) -> None:
    """Refuse a method that vLLM does not know and that is nearly one of ours."""
    if method is None:
        return
    from vllm.config.speculative import SpeculativeMethod

    if method in get_args(SpeculativeMethod):
        return
    from vllm_mtpc.errors import ServeConfigError, did_you_mean

    if hint := did_you_mean(str(method), METHODS):
        raise ServeConfigError(f"speculative_config: vLLM knows no method {method!r}{hint}")


def _create(engine_args: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Our config from what the user gave; the merging of flags stays vLLM's."""
    from vllm.engine import arg_utils

    from vllm_mtpc.proposers.config.mtpc import create
    from vllm_mtpc.proposers.seam import versions

    refuse_problems()
    if warning := versions.untested_warning():
        logger.warning(warning)
    theirs = arg_utils.SpeculativeConfig
    arg_utils.SpeculativeConfig = create
    try:
        made = original(engine_args, *args, **kwargs)
    finally:
        arg_utils.SpeculativeConfig = theirs
    check_adaptive(made, engine_args)
    return made


class CreateEngineConfig(Patch):
    module = "vllm.engine.arg_utils"
    attribute = "EngineArgs.create_engine_config"
    reason = "refuse what cannot be served exactly, once the model runner is known"
    parameters = ("self",)

    @classmethod
    def replace(cls, original: Callable[..., Any]) -> Callable[..., Any]:
        def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
            auto.begin(self)
            given = dict(vars(self))  # vLLM fills in what is not given
            try:
                vllm_config = original(self, *args, **kwargs)
                if getattr(vllm_config.speculative_config, "method", None) in METHODS:
                    vllm_config.speculative_config.take_own_schedule()
                    if auto.engaged(self):
                        auto.check_memory(vllm_config)
                    check_runner(vllm_config)
                    name_our_classes(vllm_config)
                    logger.info("%s", _drafts_in_words(vllm_config))
                if head := auto.engaged(self):
                    auto.announce(head, vllm_config.speculative_config)
                return vllm_config
            except Exception as error:
                head = auto.engaged(self)
                if head is None:
                    if is_vllm_command():
                        end_in_one_line()
                    raise
                vars(self).update(given)
                auto.give_up(self)
                vllm_config = original(self, *args, **kwargs)  # raises where the head was not to blame
                auto.warn(head, error)
                return vllm_config

        return create_engine_config


class AddCliArgs(Patch):
    module = "vllm.engine.arg_utils"
    attribute = "EngineArgs.add_cli_args"
    reason = "let --spec-method name our methods"
    parameters = ("parser",)

    @classmethod
    def replace(cls, original: Callable[..., Any]) -> Callable[..., Any]:
        def add_cli_args(parser: Any) -> Any:
            parser = original(parser)
            action = parser._option_string_actions.get("--spec-method")
            if action is not None and action.choices is not None:
                action.choices = [*action.choices, *(name for name in METHODS if name not in action.choices)]
            return parser

        return add_cli_args


class OverrideWithSpeculators(Patch):
    module = "vllm.engine.arg_utils"
    attribute = "maybe_override_with_speculators"
    reason = "`vllm serve HEAD_FOLDER`: check the head first; its verifier may be a folder, and starts at the head"
    parameters = ("model", "vllm_speculative_config")

    @classmethod
    def replace(cls, original: Callable[..., Any]) -> Callable[..., Any]:
        def maybe_override_with_speculators(*args: Any, **kwargs: Any) -> Any:
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

        return maybe_override_with_speculators


class AsyncMethods(Patch):
    module = "vllm.config.vllm"
    attribute = "EagleModelTypes"
    reason = "keep asynchronous scheduling on; vLLM allows it for a list of method names"
    parameters = None

    @classmethod
    def replace(cls, original: Any) -> Any:
        return Literal[original, "mtpc", "ptp"]


class KeepV1Schedule(Patch):
    module = "vllm.config.vllm"
    attribute = "VllmConfig._maybe_disable_dynamic_sd_for_v1"
    reason = "keep drafts by batch size on V1; vLLM drops them but for a list of method names"
    parameters = ("self",)

    @classmethod
    def replace(cls, original: Callable[..., Any]) -> Callable[..., Any]:
        def _maybe_disable_dynamic_sd_for_v1(self: Any) -> None:
            if getattr(self.speculative_config, "method", None) not in METHODS:
                original(self)

        return _maybe_disable_dynamic_sd_for_v1


PATCHES: tuple[type[Patch], ...] = (
    CreateSpeculativeConfig,
    CreateEngineConfig,
    AddCliArgs,
    OverrideWithSpeculators,
    AsyncMethods,
    KeepV1Schedule,
)


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


def name_our_classes(vllm_config: Any) -> None:
    """Have the engine of this configuration made of our worker and scheduler, and its front end count what they say."""
    from vllm_mtpc.proposers.config.mtpc import HeadSchedulerConfig
    from vllm_mtpc.proposers.seam import install_for_a_head
    from vllm_mtpc.proposers.seam.derive import name_in

    install_for_a_head()
    parallel = vllm_config.parallel_config
    parallel.worker_cls = name_in("vllm_mtpc.proposers.seam.worker", parallel.worker_cls)
    vllm_config.scheduler_config.__class__ = HeadSchedulerConfig


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


def _drafts_in_words(vllm_config: Any) -> str:
    """How many drafts there will be, in a line."""
    from vllm_mtpc.proposers.config.schedule import in_words

    spec = vllm_config.speculative_config
    is_planned = spec.method == "mtpc" and not vllm_config.use_v2_model_runner and spec.min_survival is None
    ranges = spec.num_speculative_tokens_per_batch_size
    return in_words(None if is_planned else ranges, spec.num_speculative_tokens, is_planned)


def check_adaptive(spec: Any, engine_args: Any) -> None:
    """Refuse vLLM's adaptive verification where it does not run, before vLLM does in other words."""
    from vllm.platforms import current_platform

    from vllm_mtpc.errors import ServeConfigError

    if not spec.enable_adaptive_verification:
        return
    compilation = engine_args.compilation_config
    lacking = {
        "a CPU": current_platform.is_cpu(),
        "VLLM_USE_V2_MODEL_RUNNER=0": os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0",
        "enforce_eager": engine_args.enforce_eager,
        "CUDA graphs without full ones": not _has_full_graphs(getattr(compilation, "cudagraph_mode", None)),
        "enable_lora": engine_args.enable_lora,
        "pipeline_parallel_size above 1": engine_args.pipeline_parallel_size > 1,
    }
    for what, is_given in lacking.items():
        if is_given:
            raise ServeConfigError(
                f"enable_adaptive_verification with {what}: vLLM needs Model Runner V2 on a GPU with full CUDA graphs, "
                "no LoRA and one pipeline stage; drop either; on Model Runner V1 min_survival cuts drafts"
            )


def _has_full_graphs(mode: Any) -> bool:
    return mode is None or mode.has_full_cudagraphs()


def check_runner(vllm_config: Any) -> None:
    """Refuse what a head cannot be served with on this runner; keep V1's scheduling synchronous."""
    from vllm_mtpc.errors import ServeConfigError
    from vllm_mtpc.heads import needs_lm_head
    from vllm_mtpc.proposers.config.runner import how_to_v2

    if vllm_config.speculative_config.method == "ptp":
        from vllm_mtpc.proposers.config.ptp import check_engine

        check_engine(vllm_config)
        return
    spec = vllm_config.speculative_config
    is_v2, scheduler = vllm_config.use_v2_model_runner, vllm_config.scheduler_config
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages > 1 and not (is_v2 and scheduler.async_scheduling):
        runner = "Model Runner V2 with synchronous scheduling" if is_v2 else "Model Runner V1"
        remedy = "drop --no-async-scheduling" if is_v2 else how_to_v2()
        raise ServeConfigError(
            f"pipeline_parallel_size={stages} with drafts on {runner}: vLLM crashes there; allowed: Model Runner V2 "
            f"with asynchronous scheduling; {remedy}, or use tensor parallelism"
        )
    head = spec.head
    if head.lora_layers:
        from vllm_mtpc.proposers.config.layers import check_engine

        check_engine(vllm_config)
    if vllm_config.lora_config is not None and needs_lm_head(head.head):
        raise ServeConfigError(
            f"enable_lora with a head of kind {head.head!r}: it reads the target's lm_head, whose LoRA layer takes one "
            "row per request; allowed: heads of kind 'linear', 'mlp', 'transformer'; drop enable_lora or the head"
        )
    if is_v2 and spec.min_survival:
        raise ServeConfigError(
            f"min_survival={spec.min_survival} on Model Runner V2: the host does not see drafts there; allowed: 0; "
            "drop it, or type enable_adaptive_verification: true"
        )
    if not is_v2 and spec.verify == "coupled":
        raise ServeConfigError(
            "verify='coupled' on Model Runner V1, where requests without a seed have no noise that can be drawn again; "
            f"allowed: 'rejection'; drop it, or {how_to_v2()}"
        )
    if not is_v2 and spec.rejection_sample_method == "block":
        raise ServeConfigError(
            "rejection_sample_method 'block' on Model Runner V1, which verifies token by token: allowed are 'standard' "
            "and 'synthetic'; drop it"
        )
    if not is_v2 and spec.rejection_sample_method == "synthetic" and vllm_config.device_config.device_type == "cpu":
        raise ServeConfigError(
            "rejection_sample_method 'synthetic' on Model Runner V1 on a CPU: vLLM's kernels there do not have it; "
            "allowed: 'standard'; drop it, or use a GPU"
        )
    if not is_v2:
        scheduler.async_scheduling = False  # V1 drafts from token lists on the host
        if spec.has_default_schedule and spec.min_survival is None:  # the worker plans by what it observes
            spec.num_speculative_tokens_per_batch_size = None
