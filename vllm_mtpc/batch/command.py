"""`vllm-mtpc batch`: answers every line of a file, on one engine or on many, and can be stopped and started again.

    vllm-mtpc batch --input prompts.jsonl --output answers/ --model TARGET \\
        --speculative-config '{"method": "mtpc", "model": "HEAD"}' --body '{"max_tokens": 256, "temperature": 0}'

With `--ray` the engines are actors of Ray Data, on the nodes of a cluster; without, one engine is this machine's.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pydantic import Field, field_validator

from vllm_mtpc.batch import lines, parts
from vllm_mtpc.batch.worker import Setup, Worker
from vllm_mtpc.engine.counters import Acceptance
from vllm_mtpc.engine.options import EngineOptions, parse_mapping, validated
from vllm_mtpc.errors import EngineFailed, UsageError, install
from vllm_mtpc.flags import add_flags, typed

if TYPE_CHECKING:
    import argparse

EXAMPLE = "vllm-mtpc batch --input FILE --output FOLDER --model TARGET"


class BatchOptions(EngineOptions):
    """Options of `vllm-mtpc batch`."""

    input: str = Field(min_length=1, description="file, glob or folder of .jsonl, .gz too; s3://, gs:// as fsspec has")
    output: str = Field(min_length=1, description="folder of the answers, or s3://; one that is there is gone on with")
    body: dict[str, Any] = Field({}, description="keys of every request that lacks them, JSON: max_tokens, ...")
    in_flight: int = Field(256, ge=1, description="most requests at an engine")
    part_lines: int = Field(64, ge=1, description="answers that are written at once, and lost at most")
    ray: bool = Field(False, description="run on Ray, also with one engine")
    address: str | None = Field(None, description="of the Ray cluster; default: the one of this machine, or a new one")

    @field_validator("body", mode="before")
    @classmethod
    def _body(cls, value: Any) -> Any:
        return parse_mapping(value)

    @property
    def is_on_ray(self) -> bool:
        return self.ray or self.replicas > 1 or self.address is not None

    @property
    def concurrent_parts(self) -> int:
        """One more than fills an engine, so that it does not run dry at the end of a part."""
        return -(-self.in_flight // self.part_lines) + 1

    @property
    def setup(self) -> Setup:
        return Setup(self.command, self.env, self.in_flight, self.attempts, self.start_timeout_s)


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
    output = parts.Output(options.output)
    answered = output.begin({"model": options.model, "body": options.body}, read)
    open_parts = parts.cut(read.lines, answered, options.part_lines)
    done = len(read.lines) - sum(len(part.lines) for part in open_parts)
    if done:
        print(f"{done:,} of {len(read.lines):,} lines are answered already", file=sys.stderr)
    if not open_parts:
        print(f"nothing to do: {options.output} has the answers of all {len(read.lines):,} lines")
        return 0
    results = _on_ray(options, open_parts) if options.is_on_ray else _here(options, open_parts)
    total = Total()
    with _progress(len(read.lines), done) as advance:
        try:
            for result in results:
                output.write(result["name"], result["text"])
                total.add(result)
                advance(result["lines"], total)
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
        import json

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


def _here(options: BatchOptions, open_parts: list[parts.Part]) -> Iterator[dict[str, Any]]:
    worker = Worker(options.setup)
    pool = ThreadPoolExecutor(options.concurrent_parts)
    try:
        asked = {pool.submit(worker.answer, part.lines): part.name for part in open_parts}
        for future in as_completed(asked):
            yield {"name": asked[future], **future.result()}
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        worker.close()


def _on_ray(options: BatchOptions, open_parts: list[parts.Part]) -> Iterator[dict[str, Any]]:
    from importlib.util import find_spec

    if find_spec("ray") is None:
        raise UsageError(f"Ray is not installed; type: {install('ray')}, or leave --ray and --replicas out")
    from vllm_mtpc.batch.on_ray import results

    return results(options, open_parts)


@contextmanager
def _progress(total: int, done: int) -> Iterator[Any]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("engines start", total=total, completed=done)

        def advance(lines_: int, so_far: Total) -> None:
            text = f"{so_far.tokens_per_second:,.0f} tokens/s, {so_far.errors} errors"
            progress.update(task, advance=lines_, description=text)

        yield advance


def _pair(word: str) -> tuple[str, str]:
    key, separator, value = word.partition("=")
    if not separator:
        raise UsageError(f"--engine {word}: KEY=VALUE is wanted; type: --engine max-model-len=4096 enforce-eager=true")
    return key.replace("-", "_"), value


def _cause(error: EngineFailed) -> str:
    """The line of an engine's last lines that says why."""
    tail = str(error).splitlines()
    return next((line.strip() for line in reversed(tail) if "Error" in line), tail[0])
