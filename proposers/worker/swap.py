"""Hot swap: serve another head from the next step on, e.g. after the target was fine-tuned or in RL.

    llm.collective_rpc("swap_head", args=("FOLDER",))       POST /mtpc/head over HTTP (patches/endpoint.py)

Every rank activates the new head once all have loaded it; if it fails on one rank it is refused on all. Drafts of the
last step are verified with the stored distribution they were sampled from: outputs are unchanged, requests continue.
"""

from __future__ import annotations

import os
from itertools import chain
from typing import Any

from torch import nn

from vllm_mtpc.checkpoint.locate import HUB_NAME
from vllm_mtpc.errors import CheckpointError, ServeConfigError
from vllm_mtpc.plan.draft_schedule import SCHEDULE_KEY
from vllm_mtpc.proposers.options.switches import logger, reason
from vllm_mtpc.proposers.worker.load import succeed_together

# fields of a head's config that its tensors and passes do not depend on
OTHER_FIELDS = {"speculators_config", "speculators_version", "format_version", "accepted", "draft_sample_method"} | {
    f"trained_{name}" for name in ("temperature", "top_k", "top_p")
}


def swap(runner: Any, path: str) -> dict[str, Any]:
    """Serve the head in folder `path`, return its folder, method and main sizes; ServeConfigError: it does not fit."""
    spec, commit = runner.vllm_config.speculative_config, None
    drafter = runner.speculator if runner.vllm_config.use_v2_model_runner else runner.drafter

    def configure() -> Any:
        if not os.path.exists(os.path.expanduser(path)) and HUB_NAME.fullmatch(path):
            download = f"vllm_mtpc.checkpoint.resolve_head({path!r}) downloads a head from the hub"
            raise CheckpointError(f"no head at {path}: the folder does not exist; {download} and returns its folder")
        keys = (name for name in spec.user_keys if name not in ("model", "revision", SCHEDULE_KEY))
        given = {name: getattr(spec, name) for name in keys} | {"model": path, SCHEDULE_KEY: "off"}
        targets = {name: getattr(spec, name) for name in ("target_model_config", "target_parallel_config")}
        made = type(spec).create(**given, **targets)
        if drafter is not None:
            _check_swap(spec, made, drafter)
        return made

    try:
        made = succeed_together(configure)
        if drafter is not None:  # None before the last pipeline stage
            commit = succeed_together(lambda: drafter.prepare_swap(made, runner.model))
    except Exception as error:
        raise ServeConfigError(f"the head is not swapped, {spec.model_folder} drafts on: {reason(error)}") from None
    if commit is not None:
        commit()
    vars(spec).update(model=made.model, model_folder=made.model_folder, head=made.head)  # without validation
    logger.info("Swapped the head: %r", spec)
    if (head := made.head).speculators_model_type == "mtpc":
        own = {"circuit": head.circuit.kind, "num_components": head.num_components}
    else:
        own = {"variant": head.variant}
    return {"head": made.model_folder, "method": made.method, "window": head.window} | own


def copy_tensors(old: nn.Module, new: nn.Module) -> None:
    """Copy parameters and buffers of `new` into those of `old`, which CUDA graphs read; shapes must be equal."""
    sources = dict(chain(new.named_parameters(), new.named_buffers()))
    for name, tensor in chain(old.named_parameters(), old.named_buffers()):
        if name in sources:
            tensor.copy_(sources[name])


def _check_swap(spec: Any, made: Any, drafter: Any) -> None:
    if any(getattr(one.head, "has_drafter", False) for one in (spec, made)):
        raise ServeConfigError("another drafter cannot read the kept keys and values of the text; restart the server")
    if spec.aux_layers != made.aux_layers:
        own, its = spec.aux_layers or "none", made.aux_layers or "none"
        raise ServeConfigError(f"draft layers: the served head reads layers {own}, this one {its}; restart the server")
    own, its = _fields_of(spec.head), _fields_of(made.head)
    name = next((name for name in own | its if own.get(name) != its.get(name)), None)
    if name and getattr(drafter, "keeps_shapes", False):
        reason = "for which memory and CUDA graphs were made; allowed are heads of equal shape here; restart"
        raise ServeConfigError(f"it has {name}={its.get(name)!r}, the served head {own.get(name)!r}, {reason}")


def _fields_of(head: Any) -> dict[str, Any]:
    """Return the fields of a config that tensors and passes depend on, those of a section as SECTION.NAME."""
    values = head.model_dump(exclude=OTHER_FIELDS | {"transformer_layer_config"})
    sections = {part: values.pop(part) for part in list(values) if isinstance(values[part], dict)}
    values |= {f"{part}.{name}": value for part, section in sections.items() for name, value in section.items()}
    values.pop("trunk.alpha", None)  # a scale of the adapters
    return values
