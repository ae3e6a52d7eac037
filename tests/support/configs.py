"""vLLM's configuration of an engine with a head, without the engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.demo import demo_heads
from tests.support.models import random_layers
from vllm_mtpc.checkpoint import save_head
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.heads.head import build_head


def write_head(folder: Path, target: dict[str, Any], ids: list[int] | None = None, **settings: Any) -> None:
    """A random head for the target next to its folder, with random draft layers where its trunk is `lora`.

    ids: its draft vocabulary.
    """
    given = {"circuit": "btree", "window": 5, "num_components": 3, "target": target, "verifier": "../target"}
    config = HeadConfig.create(**given | settings, draft_vocab_size=len(ids) if ids else None)
    head = build_head(config)
    if ids:
        head.set_vocabulary(torch.tensor(ids))
    if head.leaves.token_rank:  # 0 before training
        torch.nn.init.normal_(head.leaves.token_target, std=5.0)
    for mlp in getattr(head.trunk, "mlps", ()):  # 0 before training
        torch.nn.init.normal_(mlp.out_proj.weight)
    layers = random_layers(folder.parent / "target", config.lora_layers).adapters if config.lora_layers else None
    save_head(folder, config, head, {"command": "tests"}, "made by a test", torch.float32, layers)


def engine_config(model: Path, speculative_config: dict[str, Any] | None, **arguments: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    small = {"dtype": "float32", "max_model_len": 64, "skip_tokenizer_init": True, "kv_cache_memory_bytes": 1 << 26}
    return EngineArgs(str(model), speculative_config=speculative_config, **small | arguments).create_engine_config()


def ptp_config(variant: str, draft_pass: str, ranges: Any) -> Any:
    from vllm.config.parallel import ParallelConfig
    from vllm.engine.arg_utils import EngineArgs

    given = {
        "method": "ptp",
        "model": str(demo_heads.path(variant)),
        "draft_pass": draft_pass,
        "num_speculative_tokens_per_batch_size": ranges or "off",
    }
    args = EngineArgs(str(demo_heads.path("target")), speculative_config=given)  # the engine would ask for V2
    return args.create_speculative_config(args.create_model_config(), ParallelConfig())


def spec_config(num_speculative_tokens: int) -> SimpleNamespace:
    """An unchecked SpeculativeConfig: the installed vLLM's defaults, and a number of drafts."""
    from vllm.config import SpeculativeConfig

    fields = SpeculativeConfig.__pydantic_fields__
    defaults = {name: field.get_default(call_default_factory=True) for name, field in fields.items()}
    return SimpleNamespace(verify=None, **{**defaults, "num_speculative_tokens": num_speculative_tokens})
