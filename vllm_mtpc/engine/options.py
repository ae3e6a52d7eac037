"""Flags of `vllm serve`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator

API_KEY = "VLLM_API_KEY"  # vLLM's own variable
ON_CPU = {"enforce_eager": True, "kv_cache_memory_bytes": 256 << 20}  # of measured engines: several run at once


def _parse(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError as error:
        raise ValueError(f'not JSON ({error}); type it as \'{{"key": "value"}}\'') from None


JsonDict = Annotated[dict[str, Any], BeforeValidator(_parse)]  # a mapping, or JSON of it


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
