"""What vLLM says of a `speculative_config` in the calling process, before any engine starts."""

from __future__ import annotations

import copy
from functools import cached_property
from typing import Any, get_args

from pydantic import ValidationError

from vllm_mtpc.errors import UsageError, did_you_mean, first_line, one_line


class Speculation:
    """Questions about one target. engine: keyword arguments of its `vllm.LLM`, `model` among them.

    vLLM is imported, and the target's config read, by the first question. Raises UsageError where vLLM cannot read it.
    """

    def __init__(self, engine: dict[str, Any]) -> None:
        self._engine = engine

    def mtp_layers(self) -> int:
        """MTP layers that the target bundles and vLLM serves (`method: mtp`): 0 where there are none."""
        from vllm.config.speculative import MTPModelTypes, SpeculativeConfig

        config = copy.deepcopy(self._target[0].hf_config)
        try:
            found = SpeculativeConfig.hf_config_override(config)
        except ValueError:  # vLLM knows the kind of target, and this one came without its layers
            return 0
        return getattr(found, "n_predict", None) or 0 if found.model_type in get_args(MTPModelTypes) else 0

    def problem(self, speculative: dict[str, Any]) -> str | None:
        """Why vLLM would refuse it for this target, in one line; None where it would not."""
        from vllm.config.speculative import SpeculativeConfig

        allowed = sorted(SpeculativeConfig.__pydantic_fields__)
        if unknown := [key for key in speculative if key not in allowed]:
            return f"unknown key {unknown[0]!r}; allowed: {', '.join(allowed)}{did_you_mean(unknown[0], allowed)}"
        target, parallel = self._target
        try:
            SpeculativeConfig(**speculative, target_model_config=target, target_parallel_config=parallel)
        except ValidationError as error:
            return one_line(error, allowed).splitlines()[0]
        except Exception as error:  # of many kinds, and of transformers, where a draft model cannot be read
            return first_line(error)
        return None

    @cached_property
    def _target(self) -> tuple[Any, Any]:
        """vLLM's ModelConfig of the target, and the ParallelConfig that a draft model's is made from."""
        from vllm.config.parallel import ParallelConfig
        from vllm.engine.arg_utils import EngineArgs

        try:
            args = EngineArgs(**self._engine)
            return args.create_model_config(), ParallelConfig(tensor_parallel_size=args.tensor_parallel_size)
        except Exception as error:  # as above
            raise UsageError(f"target {self._engine['model']}: vLLM cannot read it: {first_line(error)}") from None
