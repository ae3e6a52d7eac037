"""Runs a stage of the GPU programme part by part; see run.sh. The stages are declared in stages.py.

A part is a command. Finished parts are kept in gpu-STAGE.json and are not run again on the same commit; one that fails
reports why, and is repeated at the next call after the parts that have not run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import psutil

from benchmarks.child_process import group, tail
from benchmarks.gpu.parts import Part, Programme
from benchmarks.gpu.stages import STAGES
from vllm_mtpc.cli import guard
from vllm_mtpc.engine import provenance
from vllm_mtpc.errors import UsageError
from vllm_mtpc.report import check_file, write_json

LIMIT_S = 480.0
GRACE_S = 15.0  # for engines to end
REASON_LINES, KEPT_LINES = 120, 40  # of a log that are kept in the result: of a part that failed, of one that is done
SAME = ("hardware", "versions", "commit", "trees", "time", "command")  # written once for a stage
DONE, FAILED = "done", "failed"


class Record:
    """gpu-STAGE.json: the state in the cache, a copy where results go."""

    def __init__(self, programme: Programme, stage: str) -> None:
        self.stage, name = stage, f"gpu-{stage}.json"
        self.state, self.copy = programme.cache / name, programme.results / name
        known = [self.state, self.copy, *([] if programme.is_toy else [provenance.RESULTS / name])]
        found = next((file for file in known if file.is_file()), None)
        self.parts: dict[str, Any] = json.loads(found.read_text(encoding="utf-8"))["parts"] if found else {}

    def is_done(self, part: Part, commit: str, engine: dict[str, Any]) -> bool:
        known = self.parts.get(part.name, {})
        is_same = known.get("commit") == commit and known.get("engine", {}) == engine
        is_of_use = part.makes.exists() if part.makes else is_same
        return known.get("state") == DONE and is_of_use

    def keep(self, part: Part, values: dict[str, Any]) -> None:
        self.parts[part.name] = values
        about = {"kind": f"gpu {self.stage}", **provenance.collect()}
        about["command"] = " ".join(["benchmarks/gpu/run.sh", *map(provenance.public, sys.argv[1:])])
        write_json(self.state, {**about, "parts": self.parts})
        if self.copy != self.state:
            self.copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.state, self.copy)


def run(part: Part, programme: Programme, stage: str, limit_s: float, commit: str) -> dict[str, Any]:
    """Run a part for at most `limit_s` seconds and return its state."""
    begun = time.monotonic()
    log = programme.cache / "logs" / f"{stage}-{part.name}.log"
    missing = [file for file in part.needs if not file.exists()]
    code: int | None = None
    if missing:
        reason = f"{missing[0]} is missing: run the stage that makes it first"
    else:
        late = contextlib.suppress(subprocess.TimeoutExpired)
        with (
            group(list(part.command), log, {**os.environ, **part.environment}) as process,
            _nothing_left(process.pid),
            late,
        ):
            code = process.wait(timeout=limit_s)
        reason = f"stopped after {limit_s:.0f} s" if code is None else f"exit code {code}"
        if code == 0 and part.proof and not re.search(part.proof, tail(log, REASON_LINES)):
            code, reason = 1, f"nothing was compared: no {part.proof!r} in its log"
    state = DONE if code == 0 else FAILED
    values: dict[str, Any] = {"state": state, "commit": commit, "trees": provenance.collect()["trees"]}
    values["seconds"] = round(time.monotonic() - begun, 1)
    if programme.engine:
        values["engine"] = programme.engine
    values["command"] = " ".join(map(shlex.quote, map(provenance.public, ["python", *part.command[1:]])))
    if part.environment:
        values["environment"] = {key: provenance.public(value) for key, value in part.environment.items()}
    if state == FAILED:
        values["reason"] = reason
    values["log"] = [] if missing else tail(log, KEPT_LINES if state == DONE else REASON_LINES).splitlines()
    if not missing and part.result is not None and part.result.is_file():
        written = json.loads(part.result.read_text(encoding="utf-8"))
        values["result"] = {key: value for key, value in written.items() if key not in SAME}
    return values


@contextlib.contextmanager
def _nothing_left(pid: int) -> Iterator[None]:
    """Stop processes that a stopped part started in other sessions: engines and their GPU memory."""
    try:
        yield
    finally:
        below: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            below = psutil.Process(pid).children(recursive=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGTERM)
        left = psutil.wait_procs(below, timeout=GRACE_S)[1]
        for one in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(left, timeout=GRACE_S)


def run_stage(programme: Programme, stage: str, names: Sequence[str], limit_s: float) -> int:
    """0 where all parts are done."""
    deadline = time.monotonic() + limit_s
    commit = provenance.commit()
    if commit is None:
        raise UsageError(
            "no commit: there is no .git here; type MTPC_COMMIT=... benchmarks/gpu/run.sh, with what git rev-parse "
            "HEAD says where there is one"
        )
    every = {part.name: part for part in STAGES[stage](programme)}
    if unknown := [name for name in names if name not in every]:
        raise UsageError(f"stage {stage} has no part {unknown[0]}; its parts are {', '.join(every)}")
    record = Record(programme, stage)
    check_file(record.copy, "OUT")
    wanted = [every[name] for name in names or every]
    waiting = [part for part in wanted if not record.is_done(part, commit, programme.engine)]
    waiting.sort(key=lambda part: part.name in record.parts and record.parts[part.name]["commit"] == commit)
    left, has_run = [], False
    for part in waiting:
        time_left = deadline - time.monotonic()
        # the first may take the whole limit: some of it has gone into starting
        if not programme.is_toy and part.seconds > (time_left if has_run else limit_s):
            left.append(part.name)
            continue
        print(f"{stage} {part.name} ...", flush=True)
        if part.result is not None and part.makes is None:
            part.result.unlink(missing_ok=True)  # of an earlier try
        values, has_run = run(part, programme, stage, time_left, commit), True
        record.keep(part, values)
        ended = f"{stage} {part.name}: {values['state']}, {values['seconds']} s {values.get('reason', '')}"
        print("\n".join([*values["log"], ended]), flush=True)
    if left:
        print(f"{stage}: no time for {', '.join(left)}; the same command again goes on there")
    return 0 if all(record.is_done(part, commit, programme.engine) for part in wanted) else 1


def listing(programme: Programme) -> int:
    commit = provenance.commit() or ""
    for stage in STAGES:
        record = Record(programme, stage)
        print(stage)
        for part in STAGES[stage](programme):
            known = record.parts.get(part.name)
            state = known["state"] if known else "not run yet"
            if known and known["commit"] != commit:
                state += f" at {known['commit'][:10]}, not at this commit"
            print(f"  {part.name:34} {state}")
    return 0


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu/run.sh", description=__doc__.splitlines()[0])
    parser.add_argument("stage", nargs="?", choices=STAGES, help="default: list stages and finished parts")
    parser.add_argument("parts", nargs="*", metavar="PART", help="of the stage (default: all)")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="SECONDS", help="default: 480")
    parser.add_argument("--engine", type=json.loads, default={}, metavar="JSON", help="more arguments of every engine")
    parser.add_argument("--toy", action="store_true", help="at toy size, on a CPU")
    args = parser.parse_args(words)
    programme = Programme(args.toy, args.engine)
    if args.stage is None:
        return guard(parser.prog, lambda: listing(programme))
    return guard(parser.prog, lambda: run_stage(programme, args.stage, args.parts, args.limit))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the part is ended on the way out
    sys.exit(main())
