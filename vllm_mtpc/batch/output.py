"""Where answers go: what a run that starts again finds there is not asked again, and nothing is ever there in half.

`Parts`, of `vllm-mtpc batch`: a folder of parts, each there as a whole or not at all, and `job.json`, what the job is.
A line of a part is a line of OpenAI's batch output: {"id", "custom_id", "response": {"status_code", "body"}, "error"}.
A part is named by its ids, so that writing it twice is writing it once.

`Responses`, of `vllm-mtpc regenerate`: a file of lines, and beside it `.meta.json`, how they were made.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_mtpc.batch.lines import Input, Line
from vllm_mtpc.checkpoint.save import package_versions
from vllm_mtpc.errors import UsageError
from vllm_mtpc.files import replace_file

if TYPE_CHECKING:
    from typing import Self

JOB = "job.json"


class Part(NamedTuple):
    """Lines that are written together."""

    name: str
    lines: list[Line]


class Parts:
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
            if not self._system.exists(f"{self._place}/{JOB}"):
                self.write(JOB, json.dumps(wanted, indent=1) + "\n")
                return set()
            before = json.loads(self._system.cat_file(f"{self._place}/{JOB}"))
            answered = self._answered()
        except OSError as error:
            raise UsageError(f"--output {self.path}: {error}") from None
        for key, there, _ in _differing(before, wanted):
            what = "an input that has changed, or lines without ids" if key == "input_sha256" else f"{key} {there!r}"
            raise UsageError(f"--output {self.path} holds answers of another job ({what}); name another folder")
        return answered

    def _answered(self) -> set[str]:
        ids = set()
        for file in self._system.ls(self._place, detail=False):  # no glob: a folder's name may hold brackets
            name = file.rsplit("/", 1)[-1]
            if name.startswith("part-") and name.endswith(".jsonl"):
                with self._system.open(file, "rt", encoding="utf-8") as lines:
                    ids |= {json.loads(line)["custom_id"] for line in lines}
        return ids

    def write(self, name: str, text: str) -> None:
        """A part at once: object stores show an object when all of it is there, a local file is moved to its name."""
        from fsspec.implementations.local import LocalFileSystem

        place = f"{self._place}/{name}"
        try:
            if isinstance(self._system, LocalFileSystem):
                replace_file(Path(place), text.encode())
            else:
                self._system.pipe_file(place, text.encode())
        except OSError as error:
            raise UsageError(f"--output {self.path}: {error}; what was written is whole: type it again") from None


def cut(lines: Iterable[Line], answered: set[str], size: int) -> list[Part]:
    """Parts of the lines that have no answer."""
    open_ = [line for line in lines if line.id not in answered]
    groups = [open_[start : start + size] for start in range(0, len(open_), size)]
    return [Part(f"part-{_digest(line.id for line in group)[:16]}.jsonl", group) for group in groups]


def _digest(ids: Iterable[str], between: str = "\n") -> str:
    return hashlib.sha256(between.join(ids).encode()).hexdigest()


def record(line: Line, status: int | None, body: Any, fault: str = "") -> dict[str, Any]:
    """A line of a part. A fault is of this program, an error of the server is in its body, too."""
    if not fault and status is not None and status >= 400:
        error = body.get("error", body) if isinstance(body, dict) else body
        fault = error.get("message", str(error)) if isinstance(error, dict) else str(error)
    return {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": line.id,
        "response": None if status is None else {"status_code": status, "body": body},
        "error": {"code": str(status or "invalid_request"), "message": fault} if fault else None,
    }


class Responses:
    """The file, open at its end and without a torn last line. `done`: the ids it holds.

    meta: how responses are made; ids: those of the run. Raises UsageError where the file is of another run.
    """

    def __init__(self, path: Path, meta: dict[str, Any], ids: set[str]) -> None:
        self.path = path
        meta = json.loads(json.dumps({**meta, "prompts": _digest(sorted(ids), "")}))
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
        if strange := self.done - ids:
            self._file.close()
            raise UsageError(f"{path}: {len(strange)} responses are not of this run; name another file")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._file.close()

    def append(self, lines: Sequence[dict[str, Any]]) -> None:
        """Adds whole lines and waits until they are on the disk; raises UsageError where they cannot be."""
        data = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode("utf-8", "surrogatepass")
        end = os.fstat(self._file.fileno()).st_size
        try:
            while data:
                data = data[self._file.write(data) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            self._file.truncate(end)  # a torn line would be cut off when the run is continued
            raise self._unwritable(error, f"; the {len(self.done)} responses in it are whole") from None
        self.done.update(line["id"] for line in lines)

    def _unwritable(self, error: OSError, more: str) -> UsageError:
        reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
        return UsageError(
            f"{self.path} could not be written ({reason}){more}; correct that and run again: it continues"
        )


def _check_meta(path: Path, side: Path, meta: dict[str, Any]) -> None:
    """Refuses a file made with other settings."""
    try:
        given = json.loads(side.read_bytes())
    except FileNotFoundError:
        raise UsageError(f"{path} is there without {side.name}; name another file, or remove it") from None
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise UsageError(f"{side} is not a JSON object; name another file for the responses, or remove both")
    if found := _differing(given, meta):
        settings = ", ".join(f"{key} {theirs!r} (asked for: {ours!r})" for key, theirs, ours in found)
        raise UsageError(
            f"{path} was made with other settings: {settings}; give the same ones to continue it, or name another file"
        )


def _differing(given: dict[str, Any], wanted: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key, given, wanted) of the settings that are not those that are wanted."""
    return [(key, given.get(key), value) for key, value in wanted.items() if given.get(key) != value]


def _read_ids(path: Path) -> set[str]:
    """Ids of the whole lines; a last line that was torn by an interruption is cut off."""
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
