"""`vllm-mtpc batch`: answer every line of a file on one engine of this machine; a stopped job can be resumed.

The engine is `vllm serve` in a child process. If it dies, it is started again, and its unanswered lines are sent again,
at most ATTEMPTS times: a request that kills engines ends with a recorded error. The last attempt of a line runs alone,
so that lines that only shared a batch with such a request are answered.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from typing import Any

from vllm_mtpc.batch.lines import Line, encode, read, record, resume
from vllm_mtpc.batch.options import BatchOptions
from vllm_mtpc.engine.counters import Acceptance
from vllm_mtpc.engine.options import API_KEY
from vllm_mtpc.engine.server import PROGRAM, VllmServer
from vllm_mtpc.errors import EngineFailed, MtpcError, UsageError, validate
from vllm_mtpc.flags import add_flags, typed
from vllm_mtpc.progress import Bar

ATTEMPTS = 3  # engines that receive a request, if each dies with it
IN_FLIGHT = 256  # requests at the engine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    fields = BatchOptions.model_fields
    for flag, name, count in (("-i", "input", "+"), ("-o", "output", None)):  # also as `vllm run-batch` names them
        names, about = (flag, f"--{name}", f"--{name}-file"), fields[name].description
        parser.add_argument(*names, dest=name, nargs=count, required=True, metavar="FILE", help=about)
    add_flags(parser, BatchOptions, only=fields.keys() - {"input", "output", "engine"})
    parser.add_argument("--engine", nargs="+", metavar="KEY=VALUE", default=[], help=fields["engine"].description)


def run(args: argparse.Namespace) -> int:
    given = {**typed(args, BatchOptions), "engine": dict(map(_pair, args.engine))}
    options = validate(BatchOptions, given, UsageError, "batch: ")
    lines = read(options.input, options.body)
    answered = resume(options.output, "custom_id", {"model": options.model, "body": options.body})
    left = [line for line in lines if line.id not in answered]
    if not left:
        print(f"nothing to do: {options.output} has the answers of all {len(lines):,} lines")
        return 0
    started, total = time.monotonic(), Counter(lines=0, errors=0, tokens=0)
    done = len(lines) - len(left)
    with open(options.output, "ab") as file, Bar(total=len(lines), initial=done, desc="answers", unit="line") as bar:

        def write(answer: dict[str, Any]) -> None:
            file.write(encode(answer))
            file.flush()
            total.update(lines=1, errors=answer["error"] is not None, tokens=count_tokens(answer))
            rate = total["tokens"] / max(time.monotonic() - started, 1e-9)
            bar.set_postfix_str(f"{rate:,.0f} tokens/s, {total['errors']} errors", refresh=False)
            bar.update(1)

        bar.set_postfix_str("the engine starts")
        try:
            counted = answer_lines(options, left, write)
        except EngineFailed as error:
            print(error, file=sys.stderr)
            raise MtpcError(f"the engine does not start: {error.reason}") from None
    seconds = time.monotonic() - started
    steps = f", {counted.tokens_per_step:.2f} tokens/step" if counted.steps or counted.drafts else ""
    print(
        f"{total['lines']:,} lines answered, {total['errors']:,} of them with an error; {total['tokens']:,} tokens in "
        f"{seconds:.0f} s with the start of the engine: {total['tokens'] / max(seconds, 1e-9):,.0f} tokens/s{steps}; "
        f"{options.output}"
    )
    return 0


def _pair(word: str) -> tuple[str, str]:
    key, separator, value = word.partition("=")
    if not separator:
        raise UsageError(f"--engine {word}: KEY=VALUE is wanted; type: --engine max-model-len=4096 enforce-eager=true")
    return key.replace("-", "_"), value


def count_tokens(answer: dict[str, Any]) -> int:
    body = (answer["response"] or {}).get("body")
    usage = body.get("usage") if isinstance(body, dict) else None
    return (usage or {}).get("completion_tokens") or 0


def answer_lines(options: BatchOptions, lines: Iterable[Line], write: Callable[[dict[str, Any]], None]) -> Acceptance:
    """Answer all lines, and return the counters of the engines that did not die.

    Raises:
        EngineFailed: an engine does not start.
    """
    left, deaths, counted = {line.id: line for line in lines}, Counter[str](), Acceptance()
    while left:
        shared = [line for line in left.values() if deaths[line.id] < ATTEMPTS - 1]
        # It has no port; with an API key of the environment it would refuse our requests
        server, is_dead = VllmServer(options.command, {API_KEY: ""}, PROGRAM), threading.Event()
        pool = ThreadPoolExecutor(IN_FLIGHT if shared else 1)
        try:
            server.start()
            asked = {pool.submit(ask, server, line, is_dead): line.id for line in shared or left.values()}
            for done in as_completed(asked):
                name = asked[done]
                try:
                    write(done.result())
                except CancelledError:
                    continue
                except EngineFailed:
                    deaths[name] += 1
                    if deaths[name] < ATTEMPTS:
                        continue
                    write(record(left[name], fault=f"the engine died while it answered, {ATTEMPTS} times in a row"))
                del left[name]
            with contextlib.suppress(EngineFailed):
                counted += server.acceptance()
        finally:
            is_dead.set()
            pool.shutdown(wait=False, cancel_futures=True)
            server.stop()
    return counted


def ask(server: VllmServer, line: Line, is_dead: threading.Event) -> dict[str, Any]:
    """Return the answer to a line. Raises EngineFailed if the engine dies, CancelledError if it was dead before."""
    if is_dead.is_set():
        raise CancelledError
    if line.fault:
        return record(line, fault=line.fault)
    try:
        answer = server.send(line.url, line.body)
        if answer.status_code >= 500:  # also of an engine that dies
            server.check()
    except EngineFailed:
        is_dead.set()
        raise
    return record(line, answer.status_code, answer.text)
