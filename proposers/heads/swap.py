"""Another head in the place of the served one, between two steps of a running engine: fine-tuned targets, RL.

    llm.collective_rpc("swap_head", args=("FOLDER",))       POST /mtpc/head over HTTP (patches/endpoint.py)

Every rank reads and checks the new head while the old one is in force, and takes it once all have; a head that does not
fit on one rank is refused on all, and nothing has changed. Drafts of the step before are verified with the
distribution that they were drawn from, which is kept next to them, whichever head made it: output keeps its
distribution, seeded text its tokens. Requests in flight go on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain
from typing import Any

from torch import Tensor, nn

from vllm_mtpc.checkpoint.locate import HUB_NAME
from vllm_mtpc.errors import CheckpointError, ServeConfigError
from vllm_mtpc.proposers.config import schedule
from vllm_mtpc.proposers.config.refusals import refuse
from vllm_mtpc.proposers.config.switches import logger, reason
from vllm_mtpc.proposers.heads.ranks import succeed_together

# of a head's config, what its tensors and passes do not depend on
OTHER_FIELDS = {"speculators_config", "speculators_version", "format_version", "accepted", "draft_sample_method"} | {
    f"trained_{name}" for name in ("temperature", "top_k", "top_p")
}


def swap(runner: Any, path: str) -> dict[str, Any]:
    """Serve the head in the folder `path` from the next step on; returns what it is.

    runner: vLLM's model runner, V1 or V2. Raises ServeConfigError, one line, where the head does not fit.
    """
    spec, commit = runner.vllm_config.speculative_config, None
    drafter = runner.speculator if runner.vllm_config.use_v2_model_runner else runner.drafter

    def check() -> Any:
        if not os.path.exists(os.path.expanduser(path)) and HUB_NAME.fullmatch(path):
            download = f"vllm_mtpc.checkpoint.resolve_head({path!r}) downloads a head from the hub"
            raise CheckpointError(f"no head at {path}: the folder does not exist; {download} and returns its folder")
        made = _like(spec, path)
        refuse({} if drafter is None else _refusals(spec, made, drafter))
        return made

    try:
        made = succeed_together(check)
        if drafter is not None:  # else not the last pipeline stage
            commit = succeed_together(lambda: drafter.prepared(made, runner.model))
    except Exception as error:  # whatever is wrong with it: the old head drafts on
        raise ServeConfigError(f"the head is not swapped, {spec.model_folder} drafts on: {reason(error)}") from None
    if commit is not None:
        commit()
    for name in ("model", "model_folder", "head"):
        object.__setattr__(spec, name, getattr(made, name))  # which validates assignments
    logger.info("Swapped the head: %r", spec)
    shown = ("circuit", "variant", "window", "num_components")
    return {"head": made.model_folder, "method": made.method} | {
        name: getattr(made.head, name) for name in shown if hasattr(made.head, name)
    }


def copy_tensors(old: nn.Module, new: nn.Module) -> None:
    """The parameters and buffers of `new` into those of `old`, where CUDA graphs read them; shapes are equal."""
    sources = dict(chain(new.named_parameters(), new.named_buffers()))
    for name, tensor in chain(old.named_parameters(), old.named_buffers()):
        if name in sources:
            tensor.copy_(sources[name])


def check_same_shapes(what: str, pairs: Iterator[tuple[Tensor, Tensor]]) -> None:
    """Raises CheckpointError where a tensor of the new head cannot take the place of the served one's."""
    for old, new in pairs:
        if old.shape != new.shape:
            raise CheckpointError(
                f"{what} has {tuple(new.shape)}, the served head {tuple(old.shape)}; allowed are equal ones; "
                "serve this head in a server of its own"
            )


def _like(spec: Any, path: str) -> Any:
    """The configuration of that head with the options of the served one; refused as at start where it does not fit."""
    keys = (name for name in spec.user_keys if name not in ("model", "revision", schedule.KEY))
    given = {name: getattr(spec, name) for name in keys} | {"model": path, schedule.KEY: "off"}
    targets = {"target_model_config": spec.target_model_config, "target_parallel_config": spec.target_parallel_config}
    return type(spec).create(**given, **targets)


def _refusals(spec: Any, made: Any, drafter: Any) -> dict[str, bool]:
    left_out = OTHER_FIELDS | {"transformer_layer_config"}
    own, its = (config.head.model_dump(exclude=left_out) for config in (spec, made))
    name = next((name for name in own if own[name] != its.get(name)), "")
    keeps_shapes = getattr(drafter, "keeps_shapes", False)
    return {
        "the head that the target bundles has failed, nothing drafts here; restart the server": getattr(
            drafter, "is_idle", False
        ),
        "heads with a backbone keep keys and values of the text, which another one cannot read; allowed are heads "
        "without; restart the server": spec.has_backbone or made.has_backbone,
        f"the served head has draft layers that read {spec.aux_layers or 'none'} of the target's layers, this one "
        f"{made.aux_layers or 'none'}; allowed are equal ones; restart the server": spec.aux_layers != made.aux_layers,
        f"it has {name}={its.get(name)!r}, the served head {own.get(name)!r}, for which memory and CUDA graphs were "
        "made; allowed are heads of equal shape here; restart the server": keeps_shapes and bool(name),
    }
