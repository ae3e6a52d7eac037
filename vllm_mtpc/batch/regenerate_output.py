"""The file of regenerated responses: appended to in whole lines, continued only with the settings it was made with."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from vllm_mtpc.checkpoint.save import package_versions
from vllm_mtpc.errors import UsageError
from vllm_mtpc.files import replace_file

if TYPE_CHECKING:
    from vllm_mtpc.batch.regenerate import RegenerateOptions
    from vllm_mtpc.batch.regenerate_prompts import Request


class Output:
    """An open file of responses. `done`: the ids it holds."""

    def __init__(self, path: Path, file: IO[bytes], done: set[str]) -> None:
        self.path, self.file, self.done = path, file, done

    def append(self, lines: Sequence[dict[str, Any]]) -> None:
        """Adds whole lines and waits until they are on the disk; raises UsageError where they cannot be."""
        data = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode("utf-8", "surrogatepass")
        end = os.fstat(self.file.fileno()).st_size
        try:
            while data:
                data = data[self.file.write(data) :]
            os.fsync(self.file.fileno())
        except OSError as error:
            self.file.truncate(end)  # a torn line would be cut off when the run is continued
            raise _unwritable(self.path, error, f"; the {len(self.done)} responses in it are whole") from None
        self.done.update(line["id"] for line in lines)


@contextmanager
def open_output(options: RegenerateOptions, requests: list[Request]) -> Iterator[Output]:
    """The output file, at its end, without a torn last line. Raises UsageError where it is of another run."""
    path = options.out
    ids = {request.id for request in requests}
    meta = json.loads(json.dumps({**options.meta(), "prompts": _digest(ids)}))
    try:
        _check_meta(path, meta)
        done = _read_ids(path) if path.exists() else set()
        file = open(path, "ab", buffering=0)  # noqa: SIM115
    except OSError as error:
        raise _unwritable(path, error, "") from None
    with file:
        if strange := done - ids:
            raise UsageError(f"{path}: {len(strange)} responses are not of this run; name another file")
        yield Output(path, file, done)


def _check_meta(path: Path, meta: dict[str, Any]) -> None:
    """Refuses a file made with other settings; writes the settings beside a file that is yet to be made."""
    side = path.with_name(path.name + ".meta.json")
    if not path.exists() or not path.stat().st_size:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(side, (json.dumps({**meta, "versions": package_versions()}, indent=2) + "\n").encode())
        return
    try:
        given = json.loads(side.read_bytes())
    except FileNotFoundError:
        raise UsageError(f"{path} is there without {side.name}; name another file, or remove it") from None
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise UsageError(f"{side} is not a JSON object; name another file for the responses, or remove both")
    differing = [
        f"{key} {given.get(key)!r} (asked for: {value!r})" for key, value in meta.items() if given.get(key) != value
    ]
    if differing:
        raise UsageError(
            f"{path} was made with other settings: {', '.join(differing)}; "
            "give the same ones to continue it, or name another file"
        )


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


def _digest(ids: set[str]) -> str:
    return hashlib.sha256("".join(sorted(ids)).encode()).hexdigest()


def _unwritable(path: Path, error: OSError, more: str) -> UsageError:
    reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
    return UsageError(f"{path} could not be written ({reason}){more}; correct that and run again: it continues")
