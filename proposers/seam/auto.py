"""A target that ships a head in its `mtpc/` folder is served with it, unasked.

Only where the user says nothing about speculative decoding. A head that cannot be served here costs a warning and the
drafts, never the target. A target that ships none costs one look at a path.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_mtpc.proposers.config.switches import AUTO, is_on, warn

MARK = "_mtpc_auto"  # attribute of EngineArgs: the head that was engaged, or None where it was given up


def head_for(engine_args: Any, target: Any) -> Path | None:
    """The head that `target` (a ModelConfig) ships, where the user has left the choice open; else None."""
    flags = ("speculative_config", "spec_method", "spec_model", "spec_tokens")
    if target is None or not is_on(AUTO, "1") or any(getattr(engine_args, flag, None) is not None for flag in flags):
        return None
    if getattr(engine_args, MARK, True) is None or target.runner_type != "generate":
        return None
    folder = _folder(target.model, target.revision)
    if folder is None or not os.path.isdir(folder / "mtpc"):
        return None
    from vllm_mtpc.checkpoint.locate import shipped_heads

    try:
        return next(iter(shipped_heads(folder)), None)
    except OSError as error:  # a folder that may not be read
        warn(folder / "mtpc", error)
        return None


def engage(engine_args: Any, head: Path, create: Callable[[], Any]) -> Any:
    """What `create` makes of a speculative_config that names the head; None and a warning where it refuses."""
    from vllm_mtpc.checkpoint.locate import head_method

    engine_args.speculative_config = {"method": head_method(head) or "mtpc", "model": str(head)}
    try:
        made = create()
        made.is_shipped = True
    except Exception as error:  # whatever is wrong with the head: the target is served
        warn(head, error)
        return None
    finally:
        engine_args.speculative_config = None  # as the user gave it
    setattr(engine_args, MARK, head)
    return made


def check_memory(vllm_config: Any) -> None:
    """Refuse a head that does not fit beside its target, as far as that is known before a worker starts: the files of
    the target, the head and what drafts take. Raises ServeConfigError."""
    from vllm.platforms import current_platform

    from vllm_mtpc.errors import ServeConfigError
    from vllm_mtpc.proposers.config.mtpc import weights_of

    try:
        total = current_platform.get_device_total_memory()
    except NotImplementedError:
        return
    spec, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    folder = _folder(spec.target_model_config.model, spec.target_model_config.revision)
    target = weights_of(folder) / (parallel.tensor_parallel_size * parallel.pipeline_parallel_size) if folder else 0
    head = spec.device_bytes(vllm_config)
    usable = total * vllm_config.cache_config.gpu_memory_utilization
    if target + head > usable:
        raise ServeConfigError(
            f"the target's {target / 2**30:.2f} GiB, and {head / 2**30:.2f} GiB of the head and its drafts at "
            f"--max-num-seqs {vllm_config.scheduler_config.max_num_seqs}, are more than the {usable / 2**30:.2f} GiB "
            "that vLLM may take of the device; lower --max-num-seqs"
        )


def _folder(model: str, revision: str | None) -> Path | None:
    """Where a target's files are: its folder, or the snapshot of a repository in the hub's cache."""
    if os.path.isdir(model):
        return Path(model)
    from huggingface_hub import try_to_load_from_cache  # vLLM has imported it

    try:
        config = try_to_load_from_cache(model, "config.json", revision=revision)
    except ValueError:  # no name of a repository: a file, an address of a cloud's storage
        return None
    return Path(config).parent if isinstance(config, str) else None
