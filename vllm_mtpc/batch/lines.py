"""Input and output of a batch job. The input has one JSON object per line, in one of three forms:

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}      OpenAI's batch format
    {"prompt": "text, or token ids", "id": "a", "max_tokens": 64, ...}                      /v1/completions
    {"messages": [{"role": "user", "content": "..."}], ...}                                 /v1/chat/completions

Other keys of the short forms belong to the request. A line without an id is called line-NUMBER. A line that is not a
request is answered with an error and does not end the job.

The output is a folder of parts, each written atomically, and `job.json`, the settings of the job: a resumed run skips
the answered lines. A line of a part has the form of OpenAI's batch output: {"id", "custom_id", "response":
{"status_code", "body"}, "error"}. The ids of a part determine its name, so that a part is never duplicated.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from vllm_mtpc.errors import UsageError
from vllm_mtpc.files import replace_file

JOB = "job.json"
SHORT_FORMS = {"prompt": "/v1/completions", "messages": "/v1/chat/completions"}


class Line(NamedTuple):
    """One request; one with a fault is not sent."""

    id: str
    url: str = ""
    body: dict[str, Any] = {}  # noqa: RUF012  (of a tuple: never changed)
    fault: str = ""


class Input(NamedTuple):
    """All lines of the files; `sha256`: their digest if a line has no id, else None."""

    lines: list[Line]
    sha256: str | None


def read(path: str, defaults: dict[str, Any]) -> Input:
    """Read the requests of a file, a glob, or a folder of .jsonl files.

    Args:
        path: as fsspec accepts it.
        defaults: keys of every body that does not have them.

    Raises:
        UsageError: a file cannot be read, or two lines have the same id.
    """
    lines: list[Line] = []
    seen: dict[str, int] = {}
    digest, is_named = hashlib.sha256(), True
    for number, text in enumerate(_texts(path), 1):
        digest.update(text.encode())
        if not text.strip():
            continue
        name, line = _parse(text, defaults)
        if name is None:
            name, is_named = f"line-{number}", False
        if name in seen:
            raise UsageError(f"{path}: id {name!r} is on lines {seen[name]} and {number}; give each its own")
        seen[name] = number
        lines.append(line._replace(id=name))
    if not lines:
        raise UsageError(
            f"{path}: no line in it; a line is {{'prompt': ...}}, {{'messages': ...}} or OpenAI's batch form"
        )
    return Input(lines, None if is_named else digest.hexdigest())


def _parse(text: str, defaults: dict[str, Any]) -> tuple[str | None, Line]:
    """Return the id that the input has, and the line without it."""
    name = None
    try:
        given = json.loads(text)
        if not isinstance(given, dict):
            raise ValueError(f"a JSON object is wanted, this is a {type(given).__name__}")
        ids = [given.pop(key, None) for key in ("custom_id", "id")]
        name = next((str(one) for one in ids if one is not None), None)
        url, body = _request(given)
        body = {**defaults, **body}
        if body.get("stream"):
            raise ValueError("stream: a batch has no streams; remove it")
    except json.JSONDecodeError as error:
        return name, Line("", fault=f"not JSON: {error}")
    except ValueError as error:
        return name, Line("", fault=str(error))
    return name, Line("", url, body)


def _request(given: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    if "url" not in given and "body" not in given:
        for key, short in SHORT_FORMS.items():
            if key in given:
                return short, given
        raise ValueError("no 'prompt', 'messages' or 'url' in it")
    url, body = given.get("url"), given.get("body")
    # No dots and escapes: /v1/../x would reach an operator's endpoints
    is_api = isinstance(url, str) and re.fullmatch(r"/v1(/[a-z0-9_-]+)+", url)
    if not is_api or given.get("method", "POST") != "POST":
        raise ValueError(f"POST to a url that begins with /v1/ is wanted, as /v1/chat/completions, not {url!r}")
    if not isinstance(body, dict):
        raise ValueError("body: a JSON object is wanted")
    return str(url), body


def _texts(path: str) -> Iterator[str]:
    import fsspec

    try:
        system, place = fsspec.url_to_fs(path)
        if system.isdir(place):
            files = sorted(name for name in system.find(place) if name.endswith((".jsonl", ".jsonl.gz")))
        else:
            files = sorted(system.glob(place)) if "*" in place else [place]
        if not files:
            raise OSError("no file matches; name a file of lines, a glob or a folder with .jsonl files")
        for name in files:
            with system.open(name, "rt", encoding="utf-8", compression="infer") as file:
                yield from file
    except (ImportError, OSError, ValueError) as error:  # ImportError: fsspec says what to install
        raise UsageError(f"{path}: cannot be read: {error}") from None


class Output:
    """The folder of parts of a job with these settings; `answered` has the ids in it.

    Raises UsageError if the folder cannot be used, or has answers of another job.
    """

    def __init__(self, path: str, job: dict[str, Any], read: Input) -> None:
        import fsspec

        self.path, self.answered, before = path, set[str](), None
        wanted = {**job, "input_sha256": read.sha256}
        try:
            self._system, self._place = fsspec.url_to_fs(path)
            if self._system.isfile(self._place):
                raise OSError("is a file; name a folder: the answers come in parts")
            self._system.invalidate_cache()  # of listings of the folder
            self._system.makedirs(self._place, exist_ok=True)
            if self._system.exists(f"{self._place}/{JOB}"):
                before = json.loads(self._system.cat_file(f"{self._place}/{JOB}"))
                files = self._system.ls(self._place, detail=False)  # no glob: a folder's name may contain brackets
                for part in (file for file in files if re.fullmatch(r".*/part-[^/]*\.jsonl", file)):
                    with self._system.open(part, "rt", encoding="utf-8") as lines:
                        self.answered |= {json.loads(line)["custom_id"] for line in lines}
        except (ImportError, OSError, ValueError) as error:
            raise UsageError(f"--output {path}: {error}") from None
        if before is None:
            self.write(JOB, json.dumps(wanted, indent=1) + "\n")
            return
        for key, there, _ in differing(before, wanted):
            what = "an input that has changed, or lines without ids" if key == "input_sha256" else f"{key} {there!r}"
            raise UsageError(f"--output {path} holds answers of another job ({what}); name another folder")

    def write(self, name: str, text: str) -> None:
        """Write a part atomically: object stores do, and a local file is renamed when it is complete."""
        from fsspec.implementations.local import LocalFileSystem

        place = f"{self._place}/{name}"
        try:
            if isinstance(self._system, LocalFileSystem):
                replace_file(Path(place), text.encode())
            else:
                self._system.pipe_file(place, text.encode())
        except OSError as error:
            raise UsageError(f"--output {self.path}: {error}; what was written is whole: type it again") from None


def split_into_parts(lines: Iterable[Line], answered: set[str], size: int) -> dict[str, list[Line]]:
    """Split the lines without an answer into parts, by name, of `size` lines each."""
    open_ = [line for line in lines if line.id not in answered]
    groups = [open_[start : start + size] for start in range(0, len(open_), size)]
    return {f"part-{digest(line.id for line in group)[:16]}.jsonl": group for group in groups}


def digest(ids: Iterable[str], between: str = "\n") -> str:
    return hashlib.sha256(between.join(ids).encode()).hexdigest()


def record(line: Line, status: int | None = None, text: str = "", fault: str = "") -> dict[str, Any]:
    """Return a line of a part for the server's answer, or for a fault; the error of a server is also in its body."""
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


def differing(given: dict[str, Any], wanted: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (key, given, wanted) of settings that differ."""
    return [(key, given.get(key), value) for key, value in wanted.items() if given.get(key) != value]
