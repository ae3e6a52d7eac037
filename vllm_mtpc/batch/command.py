"""`vllm-mtpc batch`: answer every line of a file, on one engine or on several; a stopped job can be resumed.

With `--ray` the engines are actors of Ray Data on the nodes of a cluster, otherwise one engine runs on this machine.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from importlib.util import find_spec
from operator import attrgetter
from typing import Any

from vllm_mtpc.batch import lines, worker
from vllm_mtpc.batch.options import BatchOptions
from vllm_mtpc.engine.counters import Acceptance
from vllm_mtpc.engine.options import EngineOptions, validated
from vllm_mtpc.errors import EngineFailed, UsageError, install
from vllm_mtpc.flags import add_flags, typed
from vllm_mtpc.progress import Bar

EXAMPLE = "vllm-mtpc batch --input FILE --output FOLDER --model TARGET"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    named = [name for name in BatchOptions.model_fields if name != "engine"]
    add_flags(parser, BatchOptions, required=False, only=named)
    parser.add_argument(
        "--engine", nargs="+", metavar="KEY=VALUE", default=[], help="flags of `vllm serve`: max-model-len=4096 ..."
    )


def run(args: argparse.Namespace) -> int:
    given = {name: value for name, value in typed(args, BatchOptions).items() if name != "engine"}
    options = validated(BatchOptions, {**given, "engine": dict(map(_pair, args.engine))}, EXAMPLE)
    read = lines.read(options.input, options.body)
    output = lines.Output(options.output, {"model": options.model, "body": options.body}, read)
    left = lines.split_into_parts(read.lines, output.answered, options.part_lines)
    done = len(read.lines) - sum(map(len, left.values()))
    if done:
        print(f"{done:,} of {len(read.lines):,} lines are answered already", file=sys.stderr)
    if not left:
        print(f"nothing to do: {options.output} has the answers of all {len(read.lines):,} lines")
        return 0
    parts = [{"name": name, "lines": json.dumps(part)} for name, part in left.items()]
    on_ray = partial(map_on_ray, worker.Worker, (options, worker.PROGRAM), concurrent=options.concurrent_parts)
    results = on_ray(options, parts, options.address) if options.is_on_ray else _answer_here(options, parts)
    started, total = time.monotonic(), Counter(lines=0, errors=0, tokens=0)
    engines: dict[str, Acceptance] = {}  # latest counters of each engine
    try:
        with Bar(total=len(read.lines), initial=done, desc="answers", unit="line") as bar:
            bar.set_postfix_str("engines start")
            for result in results:
                output.write(result["name"], result["text"])
                total.update({name: result[name] for name in total})
                counted = Acceptance(**json.loads(result["acceptance"]))
                before = engines.get(result["engine"], counted)  # results come in any order
                engines[result["engine"]] = max(before, counted, key=attrgetter("steps", "drafts"))
                rate = total["tokens"] / max(time.monotonic() - started, 1e-9)
                bar.set_postfix_str(f"{rate:,.0f} tokens/s, {total['errors']} errors", refresh=False)
                bar.update(result["lines"])
    except EngineFailed as error:
        print(error, file=sys.stderr)
        raise UsageError(f"the engine does not start: {error.reason}") from None
    seconds, accepted = time.monotonic() - started, sum(engines.values(), Acceptance())
    steps = f", {accepted.tokens_per_step:.2f} tokens/step" if accepted.steps or accepted.drafts else ""
    print(
        f"{total['lines']:,} lines answered, {total['errors']:,} of them with an error; {total['tokens']:,} tokens in "
        f"{seconds:.0f} s with the start of engines: {total['tokens'] / max(seconds, 1e-9):,.0f} tokens/s{steps}; "
        f"{options.output}"
    )
    return 0


def _answer_here(options: BatchOptions, parts: list[dict[str, str]]) -> Iterator[dict[str, Any]]:
    engine = worker.Worker(options, worker.PROGRAM)
    pool = ThreadPoolExecutor(options.concurrent_parts)
    try:
        for future in as_completed([pool.submit(engine, part) for part in parts]):
            yield future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        engine.close()


def map_on_ray(
    worker: type, arguments: Any, options: EngineOptions, items: Any, address: str | None = None, concurrent: int = 1
) -> Iterator[dict[str, Any]]:
    """Yield worker(*arguments)(item) of items, by an actor for each engine of the options, in any order.

    Each item is a separate block: Ray returns it when it is done, and retries it if its actor or node dies.
    """
    if find_spec("ray") is None:
        raise UsageError(f"Ray is not installed; type: {install('ray')}, or leave --ray and --replicas out")
    import ray
    from ray.data import ActorPoolStrategy, DataContext

    if not ray.is_initialized():
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = False
    asked = ray.data.from_items(items, override_num_blocks=len(items)).map(
        worker,
        fn_constructor_args=arguments,
        compute=ActorPoolStrategy(
            size=min(options.replicas, len(items)),
            max_tasks_in_flight_per_actor=concurrent,
            max_concurrent_calls_per_actor=concurrent,
            enable_true_multi_threading=True,
        ),
        num_cpus=options.cpus,
        num_gpus=options.num_gpus(bool(ray.cluster_resources().get("GPU"))),
    )
    try:
        yield from asked.iter_rows()
    except ray.exceptions.RayError as error:
        raise EngineFailed(str(error)) from None


def _pair(word: str) -> tuple[str, str]:
    key, separator, value = word.partition("=")
    if not separator:
        raise UsageError(f"--engine {word}: KEY=VALUE is wanted; type: --engine max-model-len=4096 enforce-eager=true")
    return key.replace("-", "_"), value
