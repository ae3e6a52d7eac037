"""Run `vllm serve` as a child process that never outlives its parent, and send it requests.

Every command that serves goes through `VllmServer`. Recorded states use a Unix socket, which no other
user can reach; a browser and `vllm bench serve` need a port.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import httpx

from vllm_mtpc.engine.process import engine_environment
from vllm_mtpc.errors import EngineFailed

API_KEY = "VLLM_API_KEY"  # vLLM's own variable
ON_CPU = {"enforce_eager": True, "kv_cache_memory_bytes": 256 << 20}  # of measured engines: several run at once
PROGRAM = (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve")
HOST = "127.0.0.1"
LOG_LINES = 25  # of the server's output in an error message
HEALTH_TIMEOUT_S = 20.0
ANSWER_TIMEOUT_S = 86400.0  # of a whole answer: all tokens of all prompts of a request
# A connection for each blocking request: vLLM closes those that are idle, and a request must not meet that.
CONNECTIONS = httpx.Limits(max_connections=None, max_keepalive_connections=0)
DEFINITIONS = (
    "tokens/step: tokens a request gains in one step of the target, the target's own token included, over all steps "
    "(plain decoding is 1.00).\n"
    "acceptance per position: drafts accepted at position k, divided by all drafted steps (unconditional)."
)
_PREFIX = "vllm:spec_decode_"
_STEPS = "vllm_mtpc:spec_decode_steps"  # our own; the name with vLLM's prefix counts the same steps
_OUTPUTS = ("vllm:time_to_first_token_seconds_count", "vllm:inter_token_latency_seconds_count")  # of all requests


def flags(values: dict[str, Any]) -> list[str]:
    """Return the words of a command line; True and False become --KEY and --no-KEY."""
    words = []
    for key, value in values.items():
        flag = key.replace("_", "-")
        if value is True or value == "true":
            words.append(f"--{flag}")
        elif value is False or value == "false":
            words.append(f"--no-{flag}")
        else:
            words += [f"--{flag}", value if isinstance(value, str) else json.dumps(value)]
    return words


def serve_arguments(engine: Mapping[str, Any]) -> list[str]:
    """Return keyword arguments of `vllm.LLM` as words after `vllm serve`."""
    return [str(engine["model"]), *flags({key: value for key, value in engine.items() if key != "model"})]


@dataclass(frozen=True)
class Acceptance:
    """Counters of the drafts of a run; all zero without drafts."""

    drafts: int = 0  # steps of single requests that carried drafts
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()
    steps: int = 0  # of single requests, all of them: by a head's counter, else those that returned tokens

    @property
    def tokens_per_step(self) -> float:
        """Mean over all steps if they are counted, else over those with drafts."""
        return 1.0 + self.accepted_tokens / self.steps if self.steps else self.tokens_per_drafted_step

    @property
    def tokens_per_drafted_step(self) -> float:
        return 1.0 + self.accepted_tokens / self.drafts if self.drafts else 1.0

    @property
    def per_position(self) -> tuple[float, ...]:
        return tuple(count / self.drafts for count in self.accepted_per_position) if self.drafts else ()

    def __add__(self, other: Acceptance, sign: int = 1) -> Acceptance:
        positions = zip_longest(self.accepted_per_position, other.accepted_per_position, fillvalue=0)
        return Acceptance(
            self.drafts + sign * other.drafts,
            self.draft_tokens + sign * other.draft_tokens,
            self.accepted_tokens + sign * other.accepted_tokens,
            tuple(mine + sign * its for mine, its in positions),
            self.steps + sign * other.steps,
        )

    def __sub__(self, earlier: Acceptance) -> Acceptance:
        return self.__add__(earlier, -1)

    @classmethod
    def read(cls, metrics: str) -> Acceptance:
        """Read the text of a server's /metrics: counters since its start, summed over engines."""
        from prometheus_client.parser import text_string_to_metric_families

        found, accepted, outputs, steps = Counter[str](), Counter[int](), 0, 0  # by name; by position
        for family in text_string_to_metric_families(metrics):
            outputs += sum(int(sample.value) for sample in family.samples if sample.name in _OUTPUTS)
            steps += sum(int(sample.value) for sample in family.samples if sample.name == f"{_STEPS}_total")
            for sample in family.samples if family.name.startswith(f"{_PREFIX}num_") else ():
                found[sample.name.removeprefix(_PREFIX).removesuffix("_total")] += int(sample.value)
                if "position" in sample.labels and sample.name.endswith("_total"):
                    accepted[int(sample.labels["position"])] += int(sample.value)
        per_position = tuple(count for _, count in sorted(accepted.items()))
        counts = found["num_drafts"], found["num_draft_tokens"], found["num_accepted_tokens"]
        return cls(*counts, per_position, steps or (outputs if found else 0))


def free_port() -> int:
    with socket.create_server((HOST, 0)) as probe:
        return probe.getsockname()[1]


class VllmServer:
    """One `vllm serve ARGUMENTS` in a child process, and blocking requests to it from any number of threads.

    Its output is appended to `log` (None: a temporary file), whose last lines are in error messages. Without `port` it
    listens on a Unix socket. `environment` is added to that of every engine; without an API key in it there is none,
    also if this process has one: `send` does not send it. `program` replaces `vllm serve` in tests.
    """

    process: subprocess.Popen[bytes]

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        program: Sequence[str] = PROGRAM,
        log: Path | None = None,
        port: int | None = None,
    ) -> None:
        self._folder = tempfile.mkdtemp(prefix="vllm_mtpc-")  # short: a socket's path has at most 107 characters
        path = str(Path(self._folder, "http")) if port is None else None
        where = ["--host", HOST, "--port", str(port)] if path is None else ["--uds", path]
        self.url = f"http://{HOST}:{port}" if path is None else "http://localhost"
        transport = httpx.HTTPTransport(uds=path, limits=CONNECTIONS, verify=False)
        self._http = httpx.Client(transport=transport, trust_env=False)
        self._command = [sys.executable, "-m", "vllm_mtpc.engine.process", *program, *arguments, *where]
        self._environment = {**engine_environment(), API_KEY: "", **(environment or {})}
        self._log = log or Path(self._folder, "log")

    def start(self, timeout_s: float = 1800.0) -> None:
        """Start the server and wait until it is healthy; it is stopped before EngineFailed is raised."""
        with self._log.open("ab") as output:
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": output, "stderr": subprocess.STDOUT}
            self.process = subprocess.Popen(self._command, **pipes, env=self._environment, start_new_session=True)
        deadline = time.monotonic() + timeout_s
        try:
            while not self.is_healthy():
                self.check_running()
                if time.monotonic() > deadline:
                    raise self._failure(f"was not healthy after {timeout_s:.0f} s")
                time.sleep(0.25)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the server and everything that it started."""
        assert self.process.stdin is not None  # a pipe
        with contextlib.suppress(OSError):
            self.process.stdin.close()  # the watcher then ends the server
        self.process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def check_running(self) -> None:
        """Raise EngineFailed with the last lines of the output if the server has ended."""
        if self.process.poll() is not None:
            raise self._failure(f"ended with exit code {self.process.returncode}")

    def send(self, path: str, body: Any = None, timeout_s: float = ANSWER_TIMEOUT_S) -> httpx.Response:
        """Return the answer to a GET, or to a POST of a JSON body. Raises EngineFailed if there is none."""
        method, headers = "GET" if body is None else "POST", {"Content-Type": "application/json"}
        sent: dict[str, Any] = {} if body is None else {"content": json.dumps(body), "headers": headers}
        try:
            return self._http.request(method, self.url + path, timeout=timeout_s, **sent)
        except httpx.RequestError as error:
            raise EngineFailed(f"{method} {path} is not answered: {error!r}") from None

    def is_healthy(self) -> bool:
        try:
            return self.send("/health", timeout_s=HEALTH_TIMEOUT_S).status_code == 200
        except EngineFailed:
            return False

    def acceptance(self) -> Acceptance:
        return Acceptance.read(self.send("/metrics").text)

    def model_card(self) -> dict[str, Any]:
        """Return the served model, with its `id` and `max_model_len`."""
        return self.send("/v1/models").json()["data"][0]

    def complete(self, body: dict[str, Any]) -> list[list[int]]:
        """Return the token ids of every choice of one `/v1/completions` request, see `choices`."""
        return [choice["token_ids"] for choice in self.choices(body)]

    def choices(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the choices of one `/v1/completions` request, with `token_ids`. Raises EngineFailed."""
        answer = self.send("/v1/completions", {**body, "return_token_ids": True})
        if answer.status_code != 200:
            raise EngineFailed(f"POST /v1/completions returned {answer.status_code}: {answer.text[:500]}")
        return answer.json()["choices"]

    def _failure(self, what: str) -> EngineFailed:
        text = self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""
        return EngineFailed("\n".join([f"vllm serve {what}", "Its last lines:", *text.splitlines()[-LOG_LINES:]]))


@contextlib.contextmanager
def run_server(
    arguments: Sequence[str], log: Path | None, environment: Mapping[str, str] | None = None
) -> Iterator[VllmServer]:
    """Run `vllm serve ARGUMENTS` on a free port with its output in `log`; yield it when it is healthy.

    Raises EngineFailed if the server does not start, or ends while the block asks it.
    """
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_bytes(b"")
    server = VllmServer(arguments, environment, PROGRAM, log, free_port())
    server.start()
    try:
        yield server
    except EngineFailed:
        server.check_running()
        raise
    finally:
        server.stop()
