"""`vllm-mtpc regenerate`: generate the responses to prompts of a data set with the target.

A head drafts the target's output, so it is trained on this text. vLLM runs in a child process, which frees its memory
before the head is trained.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from vllm_mtpc.batch.lines import differing, digest
from vllm_mtpc.batch.options import RegenerateOptions
from vllm_mtpc.engine.options import serve_arguments
from vllm_mtpc.engine.served import OWN_SAMPLING
from vllm_mtpc.engine.server import run_server
from vllm_mtpc.errors import SETUP, EngineFailed, UsageError, one_line
from vllm_mtpc.files import read_json, replace_file
from vllm_mtpc.flags import add_flags, typed
from vllm_mtpc.progress import Bar

if TYPE_CHECKING:
    import argparse
    from typing import Self

    from vllm_mtpc.batch.prompts import Request

IN_FLIGHT = 512  # requests at the engine
WAVE = 16  # answers that are written at once


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, RegenerateOptions)


def run(args: argparse.Namespace) -> int:
    print(f"responses: {regenerate(parse(typed(args, RegenerateOptions)))}")
    return 0


def parse(values: dict[str, Any]) -> RegenerateOptions:
    """Return validated options; raises UsageError."""
    try:
        return RegenerateOptions.model_validate(values)
    except ValidationError as error:
        raise UsageError(f"regenerate: {one_line(error, RegenerateOptions)}") from None


def regenerate(options: RegenerateOptions) -> Path:
    """Append the missing responses to `options.out` and return its path.

    One JSON object per line: `id`, `prompt_ids`, `response_ids` (with the token that ended it), `finish_reason` (stop
    or length), and for conversations `messages` with the new turn. `OUT.meta.json` has the settings. The seed of a
    response is made from its id, so that an interrupted run continues with the same text, as far as the target's logits
    do not depend on the batch. Prompts without room for a token are skipped and counted.

    Raises:
        UsageError: vLLM is missing or fails, there are no prompts, or the file was made with other settings.
    """
    if find_spec("vllm") is None:
        raise UsageError(f"responses are written by vllm, which is not installed; type: {SETUP}")
    from vllm_mtpc.batch.prompts import collect
    from vllm_mtpc.hf.model import tokenizer_if_any

    tokenizer = tokenizer_if_any(options.target)
    requests = collect(options, tokenizer)
    with Responses(options.out, options.meta(), {request.id for request in requests}) as output:
        left = [request for request in requests if request.id not in output.done]
        skipped = _write(options, left, len(requests), tokenizer, output) if left else 0
    if skipped == len(requests):
        raise UsageError(
            f"all {skipped} prompts are longer than target {options.target} can continue; "
            "give shorter prompts, or a larger --max-model-len"
        )
    if skipped:
        print(f"regenerate: skipped {skipped} of {len(requests)} prompts: no room for a response", file=sys.stderr)
    return options.out


def _write(options: RegenerateOptions, left: list[Request], total: int, tokenizer: Any, output: Responses) -> int:
    """Write the responses to `left` as they come; return the number of skipped prompts."""
    by_id = {request.id: request for request in left}
    skipped = written = 0
    with Bar(total=total, initial=total - len(left), desc="responses", unit="response") as bar:
        bar.set_postfix_str("vLLM is starting")
        with _engine(options, left, tokenizer is not None) as waves:
            begun = time.monotonic()
            bar.unpause()
            for answers in waves:
                responses = [answer for answer in answers if "response_ids" in answer]
                output.append([by_id[answer["id"]].line(answer, tokenizer) for answer in responses])
                skipped += len(answers) - len(responses)
                written += sum(len(answer["response_ids"]) for answer in responses)
                bar.set_postfix_str(f"{written / max(time.monotonic() - begun, 1e-3):,.0f} tokens/s", refresh=False)
                bar.update(len(answers))
    return skipped


@contextmanager
def _engine(
    options: RegenerateOptions, requests: list[Request], has_tokenizer: bool
) -> Iterator[Iterator[list[dict[str, Any]]]]:
    """Start the engine; yield lists of its answers in the order of the requests.

    An answer without `response_ids` was skipped: its prompt leaves no room for a token.
    """
    log = options.out.with_name(options.out.name + ".log")
    engine, sampling = options.arguments(has_tokenizer)
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


class Responses:
    """The output file, open at its end; `done` has its ids.

    Args:
        path: of the file; an incomplete last line is removed.
        meta: settings of the responses.
        ids: of all responses of the run.

    Raises:
        MtpcError: the file belongs to another run.
    """

    def __init__(self, path: Path, meta: dict[str, Any], ids: set[str]) -> None:
        from vllm_mtpc.checkpoint.save import package_versions

        self.path = path
        meta = json.loads(json.dumps({**meta, "prompts": digest(sorted(ids), "")}))
        side = path.with_name(path.name + ".meta.json")
        try:
            if path.exists() and path.stat().st_size:
                _check_meta(path, side, meta)
                self.done = _read_ids(path)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                replace_file(side, (json.dumps({**meta, "versions": package_versions()}, indent=2) + "\n").encode())
                self.done = set()
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise self._unwritable(error, "") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._file.close()

    def append(self, lines: Sequence[dict[str, Any]]) -> None:
        """Append lines and wait until they are on the disk. Raises UsageError if they cannot be written."""
        data = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode("utf-8", "surrogatepass")
        end = os.fstat(self._file.fileno()).st_size
        try:
            while data:
                data = data[self._file.write(data) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            self._file.truncate(end)  # without an incomplete line
            raise self._unwritable(error, f"; the {len(self.done)} responses in it are whole") from None
        self.done.update(line["id"] for line in lines)

    def _unwritable(self, error: OSError, more: str) -> UsageError:
        return UsageError(
            f"{self.path} could not be written ({error.strerror}){more}; correct that and run again: it continues"
        )


def _check_meta(path: Path, side: Path, meta: dict[str, Any]) -> None:
    """Raise UsageError for a file with other settings."""
    if not side.exists():
        raise UsageError(f"{path} is there without {side.name}; name another file, or remove it")
    if found := differing(read_json(side), meta):
        settings = ", ".join(f"{key} {theirs!r} (asked for: {ours!r})" for key, theirs, ours in found)
        raise UsageError(
            f"{path} was made with other settings: {settings}; give the same ones to continue it, or name another file"
        )


def _read_ids(path: Path) -> set[str]:
    """Return the ids of the complete lines; remove an incomplete last line."""
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
