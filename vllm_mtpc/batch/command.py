"""`vllm-mtpc batch`: answers every line of a file, on one engine or on many, and can be stopped and started again.

    vllm-mtpc batch --input prompts.jsonl --output answers/ --model TARGET \\
        --speculative-config '{"method": "mtpc", "model": "HEAD"}' --body '{"max_tokens": 256, "temperature": 0}'

With `--ray` the engines are actors of Ray Data, on the nodes of a cluster; without, one engine is this machine's.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING, Any

from vllm_mtpc.batch import lines, worker
from vllm_mtpc.batch.options import BatchOptions
from vllm_mtpc.batch.output import Part, Parts, cut
from vllm_mtpc.engine.counters import Acceptance
from vllm_mtpc.engine.options import validated
from vllm_mtpc.errors import EngineFailed, UsageError, install
from vllm_mtpc.flags import add_flags, typed
from vllm_mtpc.progress import Bar

if TYPE_CHECKING:
    import argparse

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
    output = Parts(options.output)
    answered = output.begin({"model": options.model, "body": options.body}, read)
    open_parts = cut(read.lines, answered, options.part_lines)
    done = len(read.lines) - sum(len(part.lines) for part in open_parts)
    if done:
        print(f"{done:,} of {len(read.lines):,} lines are answered already", file=sys.stderr)
    if not open_parts:
        print(f"nothing to do: {options.output} has the answers of all {len(read.lines):,} lines")
        return 0
    results = _on_ray(options, open_parts) if options.is_on_ray else _here(options, open_parts)
    total = Total()
    try:
        with Bar(total=len(read.lines), initial=done, desc="answers", unit="line") as bar:
            bar.set_postfix_str("engines start")
            for result in results:
                output.write(result["name"], result["text"])
                total.add(result)
                bar.set_postfix_str(f"{total.tokens_per_second:,.0f} tokens/s, {total.errors} errors", refresh=False)
                bar.update(result["lines"])
    except EngineFailed as error:
        print(error, file=sys.stderr)
        raise UsageError(f"the engine does not start: {_cause(error)}") from None
    print(total.line(options.output))
    return 0


class Total:
    """What was done in this run."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.first: float | None = None
        self.lines = self.errors = self.tokens = 0
        self._engines: dict[str, Acceptance] = {}

    def add(self, result: dict[str, Any]) -> None:
        self.lines += result["lines"]
        self.errors += result["errors"]
        self.tokens += result["tokens"]
        now = Acceptance.from_json(json.loads(result["acceptance"]))
        before = self._engines.get(result["engine"], Acceptance())
        self._engines[result["engine"]] = max(
            now, before, key=lambda one: (one.steps, one.drafts)
        )  # they come in any order

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(time.monotonic() - self.started, 1e-9)

    def line(self, output: str) -> str:
        accepted = sum(self._engines.values(), Acceptance())
        steps = f", {accepted.tokens_per_step:.2f} tokens/step" if accepted.steps or accepted.drafts else ""
        if cut := accepted.cut_line():
            steps += f" ({cut})"
        seconds = time.monotonic() - self.started
        return (
            f"{self.lines:,} lines answered, {self.errors:,} of them with an error; {self.tokens:,} tokens in "
            f"{seconds:.0f} s with the start of engines: {self.tokens_per_second:,.0f} tokens/s{steps}; {output}"
        )


def _here(options: BatchOptions, open_parts: list[Part]) -> Iterator[dict[str, Any]]:
    engine = worker.Worker(options, worker.PROGRAM)
    pool = ThreadPoolExecutor(options.concurrent_parts)
    try:
        asked = {pool.submit(engine.answer, part.lines): part.name for part in open_parts}
        for future in as_completed(asked):
            yield {"name": asked[future], **future.result()}
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        engine.close()


def _on_ray(options: BatchOptions, open_parts: list[Part]) -> Iterator[dict[str, Any]]:
    from importlib.util import find_spec

    if find_spec("ray") is None:
        raise UsageError(f"Ray is not installed; type: {install('ray')}, or leave --ray and --replicas out")
    from vllm_mtpc.batch.on_ray import results

    return results(options, open_parts, worker.PROGRAM)


def _pair(word: str) -> tuple[str, str]:
    key, separator, value = word.partition("=")
    if not separator:
        raise UsageError(f"--engine {word}: KEY=VALUE is wanted; type: --engine max-model-len=4096 enforce-eager=true")
    return key.replace("-", "_"), value


def _cause(error: EngineFailed) -> str:
    """The line of an engine's last lines that says why."""
    tail = str(error).splitlines()
    return next((line.strip() for line in reversed(tail) if "Error" in line), tail[0])
