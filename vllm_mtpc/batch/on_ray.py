"""Engines of a batch job as actors of Ray Data.

Each part is a block of its own, so it is handed back when it is answered, and asked again by Ray where its actor or
node has died. Answers come back to this process, which writes them: the output need not be seen by the nodes.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import ray
from ray.data import ActorPoolStrategy, DataContext

from vllm_mtpc.batch.options import BatchOptions
from vllm_mtpc.batch.output import Part
from vllm_mtpc.batch.worker import Worker
from vllm_mtpc.errors import EngineFailed


def results(options: BatchOptions, open_parts: list[Part], program: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Answered parts, in the order in which they are. program: as of Worker."""
    if not ray.is_initialized():
        ray.init(address=options.address, log_to_driver=False, logging_level=logging.WARNING)
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = False
    rows = [{"name": part.name, "lines": json.dumps(part.lines)} for part in open_parts]
    asked = ray.data.from_items(rows, override_num_blocks=len(rows)).map(
        Worker,
        fn_constructor_args=(options, program),
        compute=ActorPoolStrategy(
            size=min(options.replicas, len(rows)),
            max_tasks_in_flight_per_actor=options.concurrent_parts,
            max_concurrent_calls_per_actor=options.concurrent_parts,
            enable_true_multi_threading=True,
        ),
        num_cpus=options.cpus,
        num_gpus=options.num_gpus(bool(ray.cluster_resources().get("GPU"))),
    )
    try:
        yield from asked.iter_rows()
    except ray.exceptions.RayError as error:
        raise EngineFailed(str(error)) from None
