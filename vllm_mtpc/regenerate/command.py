"""`vllm-mtpc regenerate`: generate the responses to prompts of a data set with the target, to train a head on."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from vllm_mtpc.engine.served import OWN_SAMPLING
from vllm_mtpc.engine.server import run_server, serve_arguments
from vllm_mtpc.errors import SETUP, EngineFailed, UsageError, validate
from vllm_mtpc.files import read_json, replace_file
from vllm_mtpc.flags import add_flags, typed
from vllm_mtpc.regenerate.prompts import RegenerateOptions, SelfPrompts, collect
from vllm_mtpc.report import Bar

Respond = Callable[[list[list[int]], dict[str, Any], list[int]], Iterable[tuple[list[int], Any, str]]]

IN_FLIGHT = 512  # requests at the engine
WAVE = 16  # answers that are written at once
ROUND = 256  # requests that a running target answers before the next ones


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, RegenerateOptions)


def run(args: argparse.Namespace) -> int:
    options = validate(RegenerateOptions, typed(args, RegenerateOptions), UsageError, "regenerate: ")
    print(f"responses: {regenerate(options)}")
    return 0


def regenerate(options: RegenerateOptions, respond: Respond | None = None) -> Path:
    """Append the missing responses to `options.out` and return its path.

    `respond`: a running target, in place of an engine for this call.

    One JSON object per line: `id`, `prompt_ids`, `response_ids` (with the token that ended it), `finish_reason` (stop
    or length), and for conversations `messages` with the new turn. `OUT.meta.json` has the settings. The seed of a
    response is made from its id, so that an interrupted run continues with the same text, as far as the target's logits
    do not depend on the batch. Prompts without room for a token are skipped and counted. `OUT.dropped.json` has the
    conversations of the target (`prompts` self) that are left out in whole or in part. Raises UsageError.
    """
    if find_spec("vllm") is None:
        raise UsageError(f"responses are written by vllm, which is not installed; type: {SETUP}")
    from vllm_mtpc.hf.model import tokenizer_if_any

    tokenizer = tokenizer_if_any(options.target)
    own = SelfPrompts(options, tokenizer)
    requests: list[Any] = [*collect(options, tokenizer), *own.conversations]
    ids = sorted({request.id for request in requests})
    prompts = hashlib.sha256("".join(ids).encode()).hexdigest()
    done = own.resume(resume(options.out, {**options.meta(), "prompts": prompts}))
    left = {request.id: request for request in requests if request.id not in done}
    if not left:
        return options.out
    skipped, what = 0, "conversation" if own.conversations else "response"
    with (
        closing(own),
        open(options.out, "ab") as file,
        Bar(total=len(requests), initial=len(requests) - len(left), desc=f"{what}s", unit=what) as bar,
        closing(_answers(options, list(left.values()), tokenizer is not None, respond)) as answers,
    ):
        bar.set_postfix_str("vLLM is starting")
        while wave := list(islice(answers, WAVE)):
            bar.set_postfix_str("", refresh=False)
            for answer in wave:
                lines = []
                if "lines" in answer:
                    lines = own.keep(answer)
                elif "response_ids" in answer:
                    lines = [left[answer["id"]].line(answer, tokenizer)]
                else:
                    skipped += 1
                for line in lines:
                    file.write((json.dumps(line, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass"))
            file.flush()
            os.fsync(file.fileno())
            bar.update(len(wave))
    if own.conversations:
        print(f"regenerate: {own.report}", file=sys.stderr)
        if not options.out.stat().st_size:
            raise UsageError(f"{own.report}; the target writes no turn that ends: type --data NAMES as prompts")
    if skipped == len(requests):
        raise UsageError(
            f"all {skipped} prompts are longer than target {options.target} can continue; "
            "give shorter prompts, or a larger max_model_len in --engine"
        )
    if skipped:
        print(f"regenerate: skipped {skipped} of {len(requests)} prompts: no room for a response", file=sys.stderr)
    return options.out


def resume(path: Path, settings: dict[str, Any]) -> set[str]:
    """Return the ids in a file of answers, and remove its incomplete last line; a new file gets its settings.

    PATH.meta.json has the settings, JSON values that the answers depend on. Raises UsageError if the file was made with
    other ones, or has a line that is no answer.
    """
    from vllm_mtpc.checkpoint.save import package_versions

    side = path.with_name(path.name + ".meta.json")
    if not path.exists() or not path.stat().st_size:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(side, (json.dumps({**settings, "versions": package_versions()}, indent=2) + "\n").encode())
        return set()
    if not side.exists():
        raise UsageError(f"{path} is there without {side.name}; name another file, or remove it")
    given = read_json(side)
    if found := [name for name, value in settings.items() if given.get(name) != value]:
        differing = ", ".join(f"{name} {given.get(name)!r} (asked for: {settings[name]!r})" for name in found)
        raise UsageError(
            f"{path} was made with other settings: {differing}; give the same ones to continue it, or name another file"
        )
    ids, end = set(), 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            end += len(line)
            try:
                ids.add(json.loads(line)["id"])
            except (ValueError, TypeError, KeyError):
                raise UsageError(f"{path}:{number}: not a response; remove the line and run again") from None
    os.truncate(path, end)
    return ids


def answer_of(ask: Callable[..., tuple[list[int], str | None]], request: Any) -> dict[str, Any]:
    """Return the answer of a request whose texts `ask` writes, one after the other."""
    turns = request.turns()
    asked = next(turns)
    while True:
        try:
            asked = turns.send(ask(*asked))
        except StopIteration as done:
            return done.value


def _responses(requests: list[Any], sampling: dict[str, Any], respond: Respond) -> Iterator[dict[str, Any]]:
    """Yield the answers of a running target, which writes turn by turn for ROUND requests at a time."""
    for first in range(0, len(requests), ROUND):
        turns = [request.turns() for request in requests[first : first + ROUND]]
        asked = {one: next(one) for one in turns}
        while asked:
            alike: dict[str, list[Any]] = {}
            for one, (_, _, changes) in asked.items():
                alike.setdefault(str(changes), []).append(one)
            for group in alike.values():
                prompts, seeds, changes = zip(*(asked.pop(one) for one in group), strict=True)
                found = respond(list(prompts), {**sampling, **changes[0]}, list(seeds))
                for one, prompt, (tokens, _, reason) in zip(group, prompts, found, strict=True):
                    try:
                        asked[one] = one.send((tokens[len(prompt) :], reason))
                    except StopIteration as done:
                        yield done.value


def _answers(
    options: RegenerateOptions, requests: list[Any], has_tokenizer: bool, respond: Respond | None
) -> Generator[dict[str, Any], None, None]:
    """Yield answers in the order of the requests; of a prompt those without `response_ids` had no room."""
    log = options.out.with_name(options.out.name + ".log")
    engine, sampling = options.arguments(has_tokenizer)
    if respond is not None:
        yield from _responses(requests, sampling, respond)
        return
    pool = ThreadPoolExecutor(IN_FLIGHT)
    try:
        with run_server(serve_arguments({**OWN_SAMPLING, **engine}), log) as client:
            card = client.model_card()

            def ask(prompt: list[int], seed: int, changes: dict[str, Any]) -> tuple[list[int], str | None]:
                body = {"model": card["id"], "prompt": prompt, "seed": seed, **sampling, **changes}
                body["max_tokens"] = min(card["max_model_len"] - len(prompt), body["max_tokens"])
                if body["max_tokens"] < 1:
                    return [], None
                (choice,) = client.choices(body)
                return choice["token_ids"], choice["finish_reason"]

            yield from pool.map(partial(answer_of, ask), requests)
    except EngineFailed as error:
        raise UsageError(
            f"vLLM failed: {error.reason}; its log is {log}; what was answered is kept, run again to continue"
        ) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    log.unlink(missing_ok=True)
