"""Options of the app on Ray Serve: its own keys, and flags of `vllm serve` that vLLM's parser validates."""

from __future__ import annotations

import os
from typing import Any

from pydantic import Field

from vllm_mtpc.engine.options import API_KEY, EngineOptions, JsonDict, validated
from vllm_mtpc.errors import UsageError

OURS = {"host": "type: serve start --http-host X", "port": "type: serve start --http-port X", "uds": ""}
SHUTDOWN_S = 30  # for running requests when an engine is stopped; vLLM's default is 0
EXAMPLE = "serve run vllm_mtpc.ray_serve:app model=TARGET"


class ServeOptions(EngineOptions):
    """Keys of `serve run vllm_mtpc.ray_serve:app KEY=VALUE ...` and of `args` in a Serve config file."""

    min_replicas: int = Field(1, ge=0, description="minimum number of engines (autoscaling)")
    max_replicas: int | None = Field(None, ge=1, description="maximum number of engines; enables autoscaling")
    target_ongoing_requests: int = Field(16, ge=1, description="requests per engine that autoscaling aims at")
    autoscaling: JsonDict = Field({}, description="other keys of Serve's autoscaling_config, JSON: upscale_delay_s")
    max_ongoing_requests: int = Field(256, ge=1, description="most requests at an engine; others wait in Serve")
    request_timeout_s: float = Field(600, gt=0, description="longest wait for an answer or the next part of a stream")
    health_period_s: float = Field(5, gt=0, description="time between two health checks")

    @property
    def environment(self) -> dict[str, str]:
        """Variables added to the environment of an engine on any node, with the API key of this process."""
        key = os.environ.get(API_KEY)
        return {**({API_KEY: key} if key else {}), **self.env}


def parse(arguments: dict[str, Any]) -> ServeOptions:
    """Return validated options; dashes and underscores in keys are equal. Raises UsageError."""
    given = {key.replace("-", "_"): value for key, value in arguments.items()}
    for key, instead in OURS.items():
        if key in given:
            raise UsageError(f"{key}={given[key]!r} is not an engine's here: remove it; {instead}".rstrip("; "))
    own = {key: given.pop(key) for key in ServeOptions.model_fields.keys() - {"engine"} if key in given}
    return validated(ServeOptions, {**own, "engine": {"shutdown_timeout": SHUTDOWN_S, **given}}, EXAMPLE)
