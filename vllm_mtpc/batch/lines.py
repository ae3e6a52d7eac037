"""Input and output of a batch job, in the formats of OpenAI's batch API and of `vllm run-batch`.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}

A line that is not a request is answered with an error and does not end the job; without an id it is called line-NUMBER.
Answers are appended to the output, and a file beside it has the settings: a resumed run skips answered lines.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, Field, ValidationError

from vllm_mtpc.errors import UsageError, one_line
from vllm_mtpc.files import read_json, replace_file

FORM = '{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "..."}}'


class BatchRequest(BaseModel):
    """A line of the input; vLLM's own model has defaults for the keys of a body, which would precede --body."""

    custom_id: str
    method: Literal["POST"] = "POST"
    url: str = Field(pattern=r"^/v1(/[a-z0-9_-]+)+$")  # /v1/../x would reach an operator's endpoints
    body: dict[str, Any]


class Line(NamedTuple):
    """One request; one with a fault is not sent."""

    id: str
    url: str = ""
    body: dict[str, Any] = {}  # noqa: RUF012  (of a tuple: never changed)
    fault: str = ""


def read(paths: Iterable[Path], defaults: dict[str, Any]) -> list[Line]:
    """Return the requests of files; defaults: keys of every body that does not have them.

    Raises:
        UsageError: two lines have the same id, or there are none.
        OSError: a file cannot be read.
    """
    lines: dict[str, Line] = {}
    for number, text in enumerate((text for path in paths for text in path.read_bytes().splitlines()), 1):
        if text.strip():
            line = _parse(text, defaults, number)
            if line.id in lines:
                raise UsageError(f"line {number} of the input has an id of another line, {line.id!r}; give it its own")
            lines[line.id] = line
    if not lines:
        raise UsageError(f"no line in the input; a line is {FORM}")
    return list(lines.values())


def _parse(text: bytes, defaults: dict[str, Any], number: int) -> Line:
    try:
        request = BatchRequest.model_validate_json(text)
    except ValidationError as error:
        name = None
        with contextlib.suppress(ValueError, TypeError, KeyError):
            name = json.loads(text)["custom_id"]
        return Line(str(name or f"line-{number}"), fault=f"{one_line(error, BatchRequest)}; a line is {FORM}")
    body = {**defaults, **request.body}
    fault = "stream: a batch has no streams; remove it" if body.get("stream") else ""
    return Line(request.custom_id, request.url, body, fault)


def record(line: Line, status: int | None = None, text: str = "", fault: str = "") -> dict[str, Any]:
    """Return a line of the output for the server's answer, or for a fault; a server's error is also in its body."""
    try:
        body = json.loads(text)
    except json.JSONDecodeError:
        body = text
    if not fault and status is not None and status >= 400:
        error = body.get("error", body) if isinstance(body, dict) else body
        fault = error.get("message", str(error)) if isinstance(error, dict) else str(error)
    return {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": line.id,
        "response": None if status is None else {"status_code": status, "body": body},
        "error": {"code": str(status or "invalid_request"), "message": fault} if fault else None,
    }


def encode(answer: dict[str, Any]) -> bytes:
    """Return the line of a file of answers."""
    return (json.dumps(answer, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")


def resume(path: Path, key: str, settings: dict[str, Any]) -> set[str]:
    """Return the ids in a file of answers, and remove its incomplete last line; a new file gets its settings.

    Args:
        path: of the file; PATH.meta.json has its settings.
        key: of the id in each line.
        settings: JSON values that the answers depend on.

    Raises:
        UsageError: the file was made with other settings, or has a line that is no answer.
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
                ids.add(json.loads(line)[key])
            except (ValueError, TypeError, KeyError):
                raise UsageError(f"{path}:{number}: not a response; remove the line and run again") from None
    os.truncate(path, end)
    return ids
