"""What a batch job reads. One JSON object per line, in any of three forms:

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}      OpenAI's batch format
    {"prompt": "text, or token ids", "id": "a", "max_tokens": 64, ...}                      /v1/completions
    {"messages": [{"role": "user", "content": "..."}], ...}                                 /v1/chat/completions

Other keys of the short forms are the request's. A line without an id is called line-NUMBER. What is no request keeps
its place with a fault, and is answered with it: one bad line does not end a job.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from vllm_mtpc.errors import UsageError

SHORT_FORMS = {"prompt": "/v1/completions", "messages": "/v1/chat/completions"}


class Line(NamedTuple):
    """One request; with a fault it is not asked."""

    id: str
    url: str = ""
    body: dict[str, Any] = {}  # noqa: RUF012  (of a tuple: never changed)
    fault: str = ""


class Input(NamedTuple):
    """All lines of the files, and what tells whether they are the same ones."""

    lines: list[Line]
    sha256: str
    unnamed: int  # lines without an id


def read(path: str, defaults: dict[str, Any]) -> Input:
    """The requests of a file, a glob, or a folder's .jsonl; `defaults` are keys of every body that lacks them.

    Raises UsageError where the files cannot be read or two lines have one id.
    """
    lines: list[Line] = []
    seen: dict[str, int] = {}
    digest = hashlib.sha256()
    unnamed = 0
    for number, text in enumerate(_texts(path), 1):
        digest.update(text.encode())
        if not text.strip():
            continue
        line, is_named = parse(text, number, defaults)
        if line.id in seen:
            raise UsageError(f"{path}: id {line.id!r} is on lines {seen[line.id]} and {number}; give each its own")
        seen[line.id] = number
        unnamed += not is_named
        lines.append(line)
    if not lines:
        raise UsageError(
            f"{path}: no line in it; a line is {{'prompt': ...}}, {{'messages': ...}} or OpenAI's batch form"
        )
    return Input(lines, digest.hexdigest(), unnamed)


def parse(text: str, number: int, defaults: dict[str, Any]) -> tuple[Line, bool]:
    """A line, and whether it has an id of its own."""
    name = f"line-{number}"
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        return Line(name, fault=f"not JSON: {error}"), False
    if not isinstance(given, dict):
        return Line(name, fault=f"a JSON object is wanted, this is a {type(given).__name__}"), False
    custom_id, id_ = given.pop("custom_id", None), given.pop("id", None)
    id_ = id_ if custom_id is None else custom_id
    is_named = id_ is not None
    name = str(id_) if is_named else name
    if "url" in given or "body" in given:
        url, body = given.get("url"), given.get("body")
        if not isinstance(url, str) or not url.startswith("/v1/") or given.get("method", "POST") != "POST":
            return Line(name, fault=f"POST to a url that begins with /v1/ is wanted, not {url!r}"), is_named
        if not isinstance(body, dict):
            return Line(name, fault="body: a JSON object is wanted"), is_named
    else:
        key = next((key for key in SHORT_FORMS if key in given), None)
        if key is None:
            return Line(name, fault="no 'prompt', 'messages' or 'url' in it"), is_named
        url, body = SHORT_FORMS[key], given
    body = {**defaults, **body}
    if body.get("stream"):
        return Line(name, fault="stream: a batch has no streams; remove it"), is_named
    return Line(name, url, body), is_named


def _texts(path: str) -> Iterator[str]:
    import fsspec

    try:
        system, place = fsspec.url_to_fs(path)
        if system.isdir(place):
            files = sorted(name for name in system.find(place) if name.endswith((".jsonl", ".jsonl.gz")))
        else:
            files = sorted(system.glob(place)) if "*" in place else [place]
        if not files:
            raise UsageError(f"{path}: no file matches; name a file of lines, a glob or a folder with .jsonl files")
        for name in files:
            with system.open(name, "rt", encoding="utf-8", compression="infer") as file:
                yield from file
    except UsageError:
        raise
    except ImportError as error:
        raise UsageError(f"{path}: {error}") from None  # fsspec says what to install
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from None
