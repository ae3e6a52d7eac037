"""A target on vLLM that returns the hidden states it computes, of given text and of text that it generates.

The engine is `vllm serve` in a child process with `proposers/recorder.py` in its worker; states come back in
memory-mapped files. An engine that ends is started again and receives the same texts, at most ATTEMPTS times.
"""

from __future__ import annotations

import atexit
import itertools
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from vllm_mtpc.engine.options import API_KEY, ON_CPU, serve_arguments
from vllm_mtpc.engine.process import engine_environment
from vllm_mtpc.engine.served import OWN_SAMPLING
from vllm_mtpc.engine.server import PROGRAM, VllmServer
from vllm_mtpc.errors import EngineFailed, UsageError
from vllm_mtpc.heads.trunk.drafter import DRAFTER

ATTEMPTS = 3
IN_FLIGHT = 256  # requests at the engine
WAVE = 64  # texts of a file
RECORDER = {
    "worker_extension_cls": "vllm_mtpc.proposers.recorder.Recorder",
    "enable_prefix_caching": False,
    "skip_tokenizer_init": True,  # texts are token ids
}
SHARED_GPU = {"gpu_memory_utilization": 0.5}  # the head is trained on the same device
NO_STATES = torch.zeros(0, 0)


class RecordedText(NamedTuple):
    """A text and its states."""

    tokens: list[int]  # prompt and response
    states: Tensor  # [len(tokens) - 1, (layers + 1) D], on the CPU; row t after tokens[: t + 1]
    finish_reason: str = ""  # of the response; empty: the engine has no room for one


class RecordingEngine:
    """One engine, started by the first call of `record`.

    Args:
        target: folder or hub name.
        options: of `vllm serve`, which take precedence.
        on_cuda: whether the engine runs on a GPU.
        drafter: `speculative_config` with which it starts for texts with states of DRAFTER.
    """

    def __init__(
        self, target: str, options: dict[str, Any], on_cuda: bool, drafter: dict[str, Any] | None = None
    ) -> None:
        defaults = SHARED_GPU if on_cuda else {**ON_CPU, "enable_chunked_prefill": False}
        self.options = {"model": target, **OWN_SAMPLING, **defaults, **options, **RECORDER}
        self.layers: tuple[int, ...] = ()
        self.drafter = drafter
        self.server: VllmServer | None = None
        self.has_failed = False
        self.numbers = itertools.count()
        self.folder = Path(tempfile.mkdtemp(prefix="vllm_mtpc-states-"))
        self.log = self.folder.with_suffix(".log")  # stays after a failure
        atexit.register(self.close)

    def record(
        self,
        prompts: Sequence[list[int]],
        sampling: Mapping[str, Any] | None = None,
        seeds: Sequence[int] = (),
        layers: Sequence[int] = (),
    ) -> Iterator[RecordedText]:
        """Yield the prompts in their order and, with `sampling`, the target's responses, with their states.

        Args:
            prompts: token ids; a prompt alone needs two or more, and its last one is not computed.
            sampling: body of a completion request, `max_tokens` included. None: no response.
            seeds: of the responses.
            layers: as of `Target.hidden_with`.

        Raises:
            UsageError: the engine does not start, or ended ATTEMPTS times without an answer.
        """
        done, attempts = 0, ATTEMPTS
        while done < len(prompts):
            try:
                self._start(layers, may_draft=sampling is None)
                for found in self._record(prompts[done:], sampling, seeds[done:]):
                    yield found
                    done, attempts = done + 1, ATTEMPTS
            except EngineFailed as error:
                is_running, attempts = self.server is not None, attempts - 1
                self.stop()
                if not is_running or not attempts:
                    self.has_failed, name = True, self.options["model"]
                    reason = f"vLLM cannot compute its states: {error.reason}; its log is {self.log}"
                    raise UsageError(f"target {name}: {reason}") from None

    def log_probs(self, prompt: list[int]) -> dict[int, float]:
        """Return the log-probabilities of the likeliest next tokens, by token."""
        self._start((), may_draft=True)
        body = {"model": self.options["model"], "prompt": prompt, "max_tokens": 1, "temperature": 0.0}
        body |= {"logprobs": 3, "return_tokens_as_token_ids": True}
        (choice,) = self.server.choices(body)  # type: ignore[union-attr]
        return {int(name[9:]): value for name, value in choice["logprobs"]["top_logprobs"][0].items()}  # token_id:N

    def stop(self) -> None:
        """End the engine; the next call of `record` starts one."""
        if self.server is not None:
            self.server.stop()
            self.server = None

    def close(self) -> None:
        """End the engine and remove its files."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)
        if not self.has_failed:
            self.log.unlink(missing_ok=True)

    @property
    def drafts(self) -> bool:
        """Whether the engine has the drafter."""
        return DRAFTER in self.layers

    def _start(self, layers: Sequence[int], may_draft: bool) -> None:
        if self.server is not None and set(layers) <= set(self.layers) and (may_draft or not self.drafts):
            return
        self.stop()
        kept = self.layers if may_draft else ()
        self.layers = tuple(sorted({*kept, *layers}))
        options = self.options | ({"enforce_eager": True} if self.layers else {})
        if self.drafts:
            options["speculative_config"] = self.drafter
        environment = {**engine_environment(), API_KEY: "", "VLLM_SERVER_DEV_MODE": "1"}  # the mode has collective_rpc
        print(f"vLLM starts, for the states of {options['model']}", file=sys.stderr)
        server = VllmServer(serve_arguments(options), environment, PROGRAM, self.log)
        server.start()
        self.server = server
        self.limit = server.model_card()["max_model_len"]
        self._call("start_recording", json.dumps(self.layers))

    def _call(self, method: str, *arguments: str) -> None:
        assert self.server is not None
        answer = self.server.send("/collective_rpc", {"method": method, "args": arguments})
        if answer.status_code != 200:
            self.server.check_running()
            raise EngineFailed(f"{method} returned {answer.status_code}: {answer.text[:500]}")

    def _record(
        self, prompts: Sequence[list[int]], sampling: Mapping[str, Any] | None, seeds: Sequence[int]
    ) -> Iterator[RecordedText]:
        server, limit = self.server, self.limit
        assert server is not None
        if sampling is None and (longest := max(map(len, prompts)) + self.drafts) > limit:
            raise UsageError(f"a text of {longest} tokens, vLLM reads {limit}; lower seq_len, or raise max_model_len")

        def ask(place: int) -> tuple[str, RecordedText]:
            name, prompt = f"states-{next(self.numbers)}", prompts[place]
            read = prompt if self.drafts else prompt[:-1]  # a drafter's last state is conditioned on the last token
            body: dict[str, Any] = {"prompt": read, "max_tokens": 1, "temperature": 0.0}
            if sampling is not None:
                body = {**sampling, "prompt": prompt, "seed": seeds[place]}
                body["max_tokens"] = min(body["max_tokens"], limit - len(prompt))
                if body["max_tokens"] < 1:
                    return "", RecordedText(prompt, NO_STATES)
            (choice,) = server.choices({**body, "request_id": name, "model": self.options["model"]})
            response = choice["token_ids"] if sampling is not None else []
            return f"cmpl-{name}-0", RecordedText([*prompt, *response], NO_STATES, choice["finish_reason"])

        pool, last = ThreadPoolExecutor(IN_FLIGHT), None
        try:
            answers = pool.map(ask, range(len(prompts)))
            while wave := list(itertools.islice(answers, WAVE)):
                path = self.folder / f"{next(self.numbers)}.safetensors"
                rows = [(name, len(found.tokens) - 1) for name, found in wave if name]
                self._call("write_states", str(path), json.dumps(rows))  # the last one is complete then
                yield from _read(*last) if last else ()
                last = path, [found for _, found in wave]
            self._call("write_states", "", "[]")
            yield from _read(*last) if last else ()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _read(path: Path, texts: list[RecordedText]) -> list[RecordedText]:
    """Return texts with the states of a file, which stays mapped after its name is removed."""
    sizes = [len(found.tokens) - 1 if found.finish_reason else 0 for found in texts]
    states = load_file(path)["states"] if any(sizes) else NO_STATES
    path.unlink(missing_ok=True)
    return [found._replace(states=part) for found, part in zip(texts, states.split(sizes), strict=True)]
