"""What an engine is, for an app on Ray and for a batch job: its own keys, and flags of `vllm serve`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from vllm_mtpc.errors import UsageError, one_line

API_KEY = "VLLM_API_KEY"  # vLLM's own variable


def parse_mapping(value: Any) -> Any:
    """A mapping that may be JSON, for validators."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f'not JSON ({error}); type it as \'{{"key": "value"}}\'') from None


class EngineOptions(BaseModel):
    """One `vllm serve`, and what Ray sets aside for it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(min_length=1, description="the target: folder that every node sees, or hub name")
    speculative_config: dict[str, Any] | None = Field(None, description="as of `vllm serve`, JSON")
    replicas: int = Field(1, ge=1, description="engines")
    cpus: float = Field(1, ge=0, description="CPUs that Ray sets aside for an engine")
    gpus: float | None = Field(None, ge=0, description="GPUs of an engine; by default what its parallel sizes need")
    env: dict[str, str] = Field({}, description="environment of an engine, on top of its node's, JSON")
    start_timeout_s: float = Field(1800, gt=0, description="longest start of an engine")
    attempts: int = Field(3, ge=1, description="engines that a request is given to, one after the other died with it")
    engine: dict[str, Any] = Field({}, description="flags of `vllm serve`")

    _from_json = field_validator("speculative_config", "env", mode="before")(parse_mapping)

    @property
    def command(self) -> list[str]:
        """The words after `vllm serve`."""
        drafts = {"speculative_config": self.speculative_config} if self.speculative_config else {}
        return [self.model, *flags({**self.engine, **drafts})]

    def num_gpus(self, has_gpus: bool) -> float:
        """GPUs that Ray sets aside for an engine, in a cluster that has any or not."""
        if self.gpus is not None or not has_gpus:
            return self.gpus or 0
        product = 1
        for key in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
            product *= int(self.engine.get(key, 1))
        return product


Options = TypeVar("Options", bound=EngineOptions)


def validated(model: type[Options], given: dict[str, Any], example: str) -> Options:
    """Options of what was typed, folders by full names: an engine starts in another folder.

    Raises an MtpcError, the flags of `vllm serve` included. example: what to type where the model is missing.
    """
    try:
        options = model(**given)
    except ValidationError as error:
        problem = error.errors()[0]
        if problem["type"] == "missing":
            raise UsageError(f"{problem['loc'][0]} is missing; type: {example}") from None
        raise UsageError(one_line(error, model)) from None
    drafts = options.speculative_config
    if drafts and "model" in drafts:
        drafts = {**drafts, "model": _full(drafts["model"])}
    options = options.model_copy(update={"model": _full(options.model), "speculative_config": drafts})
    if "api_key" in {key.replace("-", "_") for key in options.engine}:
        raise UsageError(f"api_key: every user of a machine sees its command lines; type: {API_KEY}=... {example}")
    check_flags(options.command)
    return options


def flags(values: dict[str, Any]) -> list[str]:
    """Words of a command line: {"dtype": "float32", "enforce_eager": True, "compilation_config": {...}}."""
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


def check_flags(words: list[str]) -> None:
    """Raises an MtpcError where `vllm serve WORDS` would refuse them; nothing is started."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> None:
            raise UsageError(f"vllm serve: {message}; its flags are listed by: vllm serve --help=all")

    parser = Parser(prog="vllm")
    ServeSubcommand().subparser_init(parser.add_subparsers())
    parser.parse_args(["serve", *words])


def _full(name: Any) -> Any:
    return str(Path(name).resolve()) if isinstance(name, str) and Path(name).is_dir() else name
