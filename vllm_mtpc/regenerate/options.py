"""Options of `vllm-mtpc regenerate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from vllm_mtpc.engine.options import JsonDict

# Chunked prefill sets a generator's offset, which generators on a CPU do not have. By default vLLM reserves nearly all
# memory, and does not start if other processes use some of it.
ON_CPU = {"enforce_eager": True, "enable_chunked_prefill": False, "kv_cache_memory_bytes": 1 << 30}

RESOURCES = ("tensor_parallel_size", "gpu_memory_utilization", "kv_cache_memory_bytes")  # they do not change the text

TEMPERATURES = (0.6, 0.8, 1.0, 0.0)  # of the answers to the target's own prompts, in turn


class RegenerateOptions(BaseModel):
    """Prompts from data or by the target, and its responses. A field is a flag of `vllm-mtpc regenerate`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str = Field(min_length=1, description="model that writes: folder or hub name")
    prompts: Literal["data", "self"] = Field("data", description="self: the target writes prompts, --limit of them")
    data: list[str] = Field([], description="where prompts come from, as for vllm-mtpc train; with prompts self: more")
    out: Path = Field(description="file of responses (.jsonl), continued if it is there")
    temperature: float = Field(1.0, ge=0, description="of sampling; 0: greedy; prompts self: 0.6, 0.8, 1 and 0 in turn")
    top_p: float = Field(1.0, gt=0, le=1, description="1: off")
    top_k: int = Field(0, ge=0, description="0: off")
    max_tokens: int = Field(512, ge=1, description="tokens of a response at most")
    prompt_tokens: int = Field(32, ge=1, description="tokens of a prompt cut from text")
    crops: int = Field(0, ge=0, description="prompts cut from random places of each text; 0: one, its beginning")
    limit: int | None = Field(None, ge=1, description="prompts at most, picked at random; prompts self: conversations")
    seed: int = Field(0, ge=0, description="decides which prompts are cut and what is sampled")
    split: str = Field("train", description="split of a datasets name")
    dtype: str = Field("auto", description="auto, float32, bfloat16 or float16")
    ignore_eos: bool = Field(False, description="write on after the end-of-text token")
    engine: JsonDict = Field({}, description='more of vllm.LLM, as {"tensor_parallel_size": 2}')

    @model_validator(mode="after")
    def _has_prompts(self) -> RegenerateOptions:
        if self.prompts == "data" and not self.data:
            raise ValueError("data is missing; type --data NAMES, or --prompts self --limit N without data")
        if self.prompts == "self" and self.limit is None:
            raise ValueError("prompts self without limit; type --limit N, the number of conversations")
        return self

    @property
    def temperatures(self) -> tuple[float, ...]:
        """Temperatures of the answers to own prompts, in turn."""
        return (self.temperature,) if "temperature" in self.model_fields_set else TEMPERATURES

    def meta(self) -> dict[str, Any]:
        """Return the settings that determine the text: a file is continued with equal ones only."""
        engine = {key: value for key, value in self.engine.items() if key not in RESOURCES}
        own = {"temperatures": list(self.temperatures)} if self.prompts == "self" else {}
        return {**self.model_dump(mode="json", exclude={"out", "prompts"}), "engine": engine, **own}

    def arguments(self, has_tokenizer: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the arguments of the engine and of the requests' sampling."""
        from vllm_mtpc.hf import choose_device

        engine = {
            "model": self.target,
            "dtype": self.dtype,
            "skip_tokenizer_init": not has_tokenizer,
            "disable_log_stats": True,
            "seed": self.seed,
            **(ON_CPU if choose_device("auto").type == "cpu" else {}),
            **self.engine,
        }
        return engine, self.model_dump(include={"temperature", "top_p", "top_k", "ignore_eos", "max_tokens"})
