"""Options of engines: flags of `vllm serve`, and own keys of an app on Ray and of a batch job."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from vllm_mtpc.errors import UsageError, first_line, validate

API_KEY = "VLLM_API_KEY"  # vLLM's own variable
ON_CPU = {"enforce_eager": True, "kv_cache_memory_bytes": 256 << 20}  # of measured engines: several run at once


def _parse(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError as error:
        raise ValueError(f'not JSON ({error}); type it as \'{{"key": "value"}}\'') from None


JsonDict = Annotated[dict[str, Any], BeforeValidator(_parse)]  # a mapping, or JSON of it


class EngineOptions(BaseModel):
    """One `vllm serve`, and the resources that Ray reserves for it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(min_length=1, description="the target: folder on every node, or hub name")
    speculative_config: JsonDict | None = Field(None, description="of `vllm serve`, JSON")
    replicas: int = Field(1, ge=1, description="engines")
    cpus: float = Field(1, ge=0, description="CPUs that Ray reserves for an engine")
    gpus: float | None = Field(None, ge=0, description="GPUs of an engine; default: the product of its parallel sizes")
    env: Annotated[dict[str, str], BeforeValidator(_parse)] = Field(
        {}, description="environment of an engine, added to its node's, JSON"
    )
    start_timeout_s: float = Field(1800, gt=0, description="longest start of an engine")
    attempts: int = Field(3, ge=1, description="engines that receive a request, if each dies with it")
    engine: dict[str, Any] = Field({}, description="flags of `vllm serve`")

    @property
    def command(self) -> list[str]:
        """Words after `vllm serve`."""
        drafts = {"speculative_config": self.speculative_config} if self.speculative_config else {}
        return serve_arguments({"model": self.model, **self.engine, **drafts})

    def num_gpus(self, has_gpus: bool) -> float:
        """Return the number of GPUs that Ray reserves for an engine."""
        if self.gpus is not None or not has_gpus:
            return self.gpus or 0
        return math.prod(int(self.engine.get(f"{kind}_parallel_size", 1)) for kind in ("tensor", "pipeline", "data"))


Options = TypeVar("Options", bound=EngineOptions)


def validated(model: type[Options], given: dict[str, Any], example: str) -> Options:
    """Validate options, the flags of `vllm serve` included; folders become absolute paths.

    Args:
        model: class of the options.
        given: values by their names.
        example: a command line for the error about a missing option.

    Raises:
        UsageError: an option or a flag is not valid.
    """
    required = [name for name, field in model.model_fields.items() if field.is_required()]
    if missing := [name for name in required if name not in given]:
        raise UsageError(f"{missing[0]} is missing; type: {example}")
    options = validate(model, given, UsageError)
    drafts = options.speculative_config
    if drafts and "model" in drafts:
        drafts = {**drafts, "model": _full(drafts["model"])}
    options = options.model_copy(update={"model": _full(options.model), "speculative_config": drafts})
    if "api_key" in {key.replace("-", "_") for key in options.engine}:
        raise UsageError(f"api_key: every user of a machine sees its command lines; type: {API_KEY}=... {example}")
    check_flags(options.command)
    return options


def flags(values: dict[str, Any]) -> list[str]:
    """Return the words of a command line; True and False become --KEY and --no-KEY."""
    words = []
    for key, value in values.items():
        flag = key.replace("_", "-")
        if value is True or value == "true":
            words.append(f"--{flag}")
        elif value is False or value == "false":
            words.append(f"--no-{flag}")
        else:
            words += [f"--{flag}", value if isinstance(value, str) else json.dumps(value)]
    return words


def serve_arguments(engine: Mapping[str, Any]) -> list[str]:
    """Return keyword arguments of `vllm.LLM` as words after `vllm serve`."""
    return [str(engine["model"]), *flags({key: value for key, value in engine.items() if key != "model"})]


def check_flags(words: list[str]) -> None:
    """Raise UsageError if the parser of `vllm serve` refuses the words."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> None:
            raise UsageError(f"vllm serve: {message}; its flags are listed by: vllm serve --help=all")

    parser = Parser(prog="vllm")
    ServeSubcommand().subparser_init(parser.add_subparsers())
    parser.parse_args(["serve", *words])


def read_model_config(engine: dict[str, Any]) -> Any:
    """Return vLLM's ModelConfig of the engine's target, without starting the engine.

    Args:
        engine: keyword arguments of `vllm.LLM`, `model` among them.

    Raises:
        UsageError: vLLM cannot read the target's config.
    """
    from vllm.engine.arg_utils import EngineArgs

    try:
        return EngineArgs(**{**engine, "speculative_config": None}).create_model_config()
    except Exception as error:  # of many kinds, also from transformers
        raise UsageError(f"target {engine['model']}: vLLM cannot read it: {first_line(error)}") from None


def count_mtp_layers(engine: dict[str, Any]) -> int:
    """Return the number of MTP layers that a target bundles and vLLM serves (`method: mtp`)."""
    from vllm.config.speculative import MTPModelTypes, SpeculativeConfig

    target = read_model_config(engine).hf_config
    try:
        config = SpeculativeConfig.hf_config_override(copy.deepcopy(target))
    except ValueError:  # a model that may have MTP layers, and this one has none
        return 0
    return (getattr(config, "n_predict", None) or 0) if config.model_type in get_args(MTPModelTypes) else 0


def _full(name: Any) -> Any:
    return str(Path(name).resolve()) if isinstance(name, str) and Path(name).is_dir() else name
