"""What a batch job writes: a folder of parts, each there as a whole or not at all, and `job.json`, what the job is.

A line of a part is a line of OpenAI's batch output: {"id", "custom_id", "response": {"status_code", "body"}, "error"}.
A job that starts again reads which ids the parts hold and asks the others. A part is named by its ids, so that writing
it twice is writing it once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from vllm_mtpc.batch.lines import Input, Line
from vllm_mtpc.errors import UsageError

JOB = "job.json"


class Part(NamedTuple):
    """Lines that are written together."""

    name: str
    lines: list[Line]


class Output:
    """The folder."""

    def __init__(self, path: str) -> None:
        import fsspec

        try:
            self._system, self._place = fsspec.url_to_fs(path)
        except (ImportError, ValueError) as error:
            raise UsageError(f"{path}: {error}") from None
        self.path = path
        if self._system.isfile(self._place):
            raise UsageError(f"--output {path} is a file; name a folder: the answers come in parts")

    def begin(self, job: dict[str, Any], input_: Input) -> set[str]:
        """Ids that are answered already. Raises UsageError where the folder holds the answers of another job."""
        wanted = {**job, "input_sha256": input_.sha256 if input_.unnamed else None}
        try:
            self._system.invalidate_cache()  # of what lies in the folder, from an earlier look
            self._system.makedirs(self._place, exist_ok=True)
            before = self._read(JOB)
            if before is None:
                self._write(JOB, json.dumps(wanted, indent=1) + "\n")
                return set()
            answered = self._answered()
        except OSError as error:
            raise UsageError(f"--output {self.path}: {error}") from None
        for key, value in wanted.items():
            there = json.loads(before).get(key)
            if there != value:
                what = (
                    "an input that has changed, or lines without ids" if key == "input_sha256" else f"{key} {there!r}"
                )
                raise UsageError(f"--output {self.path} holds answers of another job ({what}); name another folder")
        return answered

    def write(self, name: str, text: str) -> None:
        """A part, at once."""
        self._write(name, text)

    def _answered(self) -> set[str]:
        ids = set()
        for file in self._system.ls(self._place, detail=False):  # no glob: a folder's name may hold brackets
            name = file.rsplit("/", 1)[-1]
            if not (name.startswith("part-") and name.endswith(".jsonl")):
                continue
            with self._system.open(file, "rt", encoding="utf-8") as lines:
                ids |= {json.loads(line)["custom_id"] for line in lines}
        return ids

    def _read(self, name: str) -> str | None:
        with contextlib.suppress(FileNotFoundError):
            return self._system.cat_file(f"{self._place}/{name}").decode()
        return None

    def _write(self, name: str, text: str) -> None:
        """Object stores show an object when all of it is there; a file is moved to its name when it is whole."""
        from fsspec.implementations.local import LocalFileSystem

        place = f"{self._place}/{name}"
        try:
            if isinstance(self._system, LocalFileSystem):
                _move_into(place, f"{self._place}/.{name}.{uuid.uuid4().hex[:8]}", text)
            else:
                self._system.pipe_file(place, text.encode())
        except OSError as error:
            raise UsageError(f"--output {self.path}: {error}; what was written is whole: type it again") from None


def _move_into(place: str, unfinished: str, text: str) -> None:
    """A local file that is there whole or not at all."""
    try:
        with open(unfinished, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, place)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise


def cut(lines: Iterable[Line], answered: set[str], size: int) -> list[Part]:
    """Parts of the lines that have no answer."""
    open_ = [line for line in lines if line.id not in answered]
    groups = [open_[start : start + size] for start in range(0, len(open_), size)]
    return [Part(_name(group), group) for group in groups]


def _name(lines: Sequence[Line]) -> str:
    ids = "\n".join(line.id for line in lines)
    return f"part-{hashlib.sha256(ids.encode()).hexdigest()[:16]}.jsonl"


def record(line: Line, status: int | None, body: Any, fault: str = "") -> dict[str, Any]:
    """A line of the output. A fault is of this program, an error of the server is in its body, too."""
    if not fault and status is not None and status >= 400:
        error = body.get("error", body) if isinstance(body, dict) else body
        fault = error.get("message", str(error)) if isinstance(error, dict) else str(error)
    return {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": line.id,
        "response": None if status is None else {"status_code": status, "body": body},
        "error": {"code": str(status or "invalid_request"), "message": fault} if fault else None,
    }
