"""`vllm-mtpc regenerate`: generate the responses to prompts of a data set with the target, to train a head on."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from vllm_mtpc.batch.lines import differing, digest
from vllm_mtpc.batch.options import RegenerateOptions
from vllm_mtpc.batch.prompts import Request, collect
from vllm_mtpc.engine.options import serve_arguments
from vllm_mtpc.engine.served import OWN_SAMPLING
from vllm_mtpc.engine.server import run_server
from vllm_mtpc.errors import SETUP, EngineFailed, UsageError, validate
from vllm_mtpc.files import read_json, replace_file
from vllm_mtpc.flags import add_flags, typed
from vllm_mtpc.progress import Bar

Respond = Callable[[list[list[int]], dict[str, Any], list[int]], Iterable[tuple[list[int], Any, str]]]

IN_FLIGHT = 512  # requests at the engine
WAVE = 16  # answers that are written at once


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
    do not depend on the batch. Prompts without room for a token are skipped and counted.

    Raises:
        UsageError: vLLM is missing or fails, there are no prompts, or the file was made with other settings.
        OSError: the file cannot be written; the next run removes an incomplete last line.
    """
    if find_spec("vllm") is None:
        raise UsageError(f"responses are written by vllm, which is not installed; type: {SETUP}")
    from vllm_mtpc.hf.model import tokenizer_if_any

    tokenizer = tokenizer_if_any(options.target)
    requests = collect(options, tokenizer)
    done = _resume(options, sorted({request.id for request in requests}))
    left = {request.id: request for request in requests if request.id not in done}
    if not left:
        return options.out
    skipped = written = 0
    with (
        open(options.out, "ab") as file,
        Bar(total=len(requests), initial=len(requests) - len(left), desc="responses", unit="response") as bar,
    ):
        bar.set_postfix_str("vLLM is starting")
        with _engine(options, list(left.values()), tokenizer is not None, respond) as waves:
            begun = time.monotonic()
            bar.unpause()
            for answers in waves:
                responses = [answer for answer in answers if "response_ids" in answer]
                for answer in responses:
                    line = json.dumps(left[answer["id"]].line(answer, tokenizer), ensure_ascii=False) + "\n"
                    file.write(line.encode("utf-8", "surrogatepass"))
                file.flush()
                os.fsync(file.fileno())
                skipped += len(answers) - len(responses)
                written += sum(len(answer["response_ids"]) for answer in responses)
                bar.set_postfix_str(f"{written / max(time.monotonic() - begun, 1e-3):,.0f} tokens/s", refresh=False)
                bar.update(len(answers))
    if skipped == len(requests):
        raise UsageError(
            f"all {skipped} prompts are longer than target {options.target} can continue; "
            "give shorter prompts, or a larger max_model_len in --engine"
        )
    if skipped:
        print(f"regenerate: skipped {skipped} of {len(requests)} prompts: no room for a response", file=sys.stderr)
    return options.out


@contextmanager
def _engine(
    options: RegenerateOptions, requests: list[Request], has_tokenizer: bool, respond: Respond | None
) -> Iterator[Iterator[list[dict[str, Any]]]]:
    """Yield an engine's answers in the order of the requests; those without `response_ids` were skipped."""
    log = options.out.with_name(options.out.name + ".log")
    engine, sampling = options.arguments(has_tokenizer)
    if respond is not None:
        seeds = [int(one.id[:8], 16) for one in requests]
        found = respond([one.prompt_ids for one in requests], {**sampling, "max_tokens": options.max_tokens}, seeds)
        waiting = (
            {"id": one.id}
            | ({"response_ids": tokens[len(one.prompt_ids) :], "finish_reason": reason} if reason else {})
            for one, (tokens, _, reason) in zip(requests, found, strict=True)
        )
        yield iter(lambda: list(islice(waiting, WAVE)), [])
        return
    pool = ThreadPoolExecutor(IN_FLIGHT)
    try:
        with run_server(serve_arguments({**OWN_SAMPLING, **engine}), log) as client:
            card = client.model_card()

            def answer(request: Request) -> dict[str, Any]:
                room = card["max_model_len"] - len(request.prompt_ids)
                if room < 1:
                    return {"id": request.id}
                body = {"model": card["id"], "prompt": request.prompt_ids, "seed": int(request.id[:8], 16), **sampling}
                (choice,) = client.choices({**body, "max_tokens": min(room, options.max_tokens)})
                found = {"id": request.id, "response_ids": choice["token_ids"]}
                return found | {"finish_reason": choice["finish_reason"]}

            answers = pool.map(answer, requests)
            yield iter(lambda: list(islice(answers, WAVE)), [])
    except EngineFailed as error:
        raise UsageError(
            f"vLLM failed: {error.reason}; its log is {log}; what was answered is kept, run again to continue"
        ) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    log.unlink(missing_ok=True)


def _resume(options: RegenerateOptions, ids: list[str]) -> set[str]:
    """Return the ids in the output file and remove its incomplete last line; a new file gets its settings."""
    from vllm_mtpc.checkpoint.save import package_versions

    path, meta = options.out, {**options.meta(), "prompts": digest(ids, "")}
    side = path.with_name(path.name + ".meta.json")
    if not path.exists() or not path.stat().st_size:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(side, (json.dumps({**meta, "versions": package_versions()}, indent=2) + "\n").encode())
        return set()
    if not side.exists():
        raise UsageError(f"{path} is there without {side.name}; name another file, or remove it")
    if found := differing(read_json(side), meta):
        settings = ", ".join(f"{key} {theirs!r} (asked for: {ours!r})" for key, theirs, ours in found)
        raise UsageError(
            f"{path} was made with other settings: {settings}; give the same ones to continue it, or name another file"
        )
    done, end = set(), 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            end += len(line)
            try:
                done.add(json.loads(line)["id"])
            except (ValueError, TypeError, KeyError):
                raise UsageError(f"{path}:{number}: not a response; remove the line and run again") from None
    os.truncate(path, end)
    return done
