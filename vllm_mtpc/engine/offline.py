"""An engine (``vllm.LLM``) in a process of its own, measured pass by pass.

``resident`` starts this module as a process, with a job (JSON); the child builds the engine once, says what
it is, and then measures one pass for every setting it is sent. While nothing is asked of it, it sleeps: several
engines can be alive and take turns.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, TextIO

from vllm_mtpc.engine.counters import Acceptance
from vllm_mtpc.engine.passes import Measured, Prompt, Setting
from vllm_mtpc.engine.process import engine_child, failure
from vllm_mtpc.engine.steps import StepClock, is_v2, runner_of, worker_of

WARM_UP_TOKENS = 8


class Resident:
    """An engine that waits for settings.

    ``about``: the model runner it uses (``runner``: V1 or V2); on a GPU the memory left for its KV cache
    (``kv_cache_bytes``).
    """

    def __init__(self, process: subprocess.Popen[bytes], results: TextIO, log: Path) -> None:
        self._process, self._results, self._log = process, results, log

    @cached_property
    def about(self) -> dict[str, Any]:
        """What the engine says when it is ready, which is waited for."""
        return self._answer()

    def measure(self, setting: Setting) -> Measured:
        """One pass. Raises EngineFailed, with the end of the log, where the engine has ended."""
        _ = self.about  # comes before any pass
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(asdict(setting)).encode() + b"\n")
            self._process.stdin.flush()
        return Measured.from_json(self._answer())

    def _answer(self) -> dict[str, Any]:
        line = self._results.readline()
        if not line:
            raise failure("the offline engine", self._process.wait(), self._log)
        return json.loads(line)


@contextlib.contextmanager
def launched(
    engine: dict[str, Any], prompts: Sequence[Prompt], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Resident]:
    """An engine that is starting; several start at once. ``engine`` holds the keyword arguments of ``vllm.LLM``."""
    job = json.dumps({"engine": engine, "prompts": list(prompts)})
    with engine_child("vllm_mtpc.engine.offline", job, log, environment, subprocess.PIPE) as (process, results):
        yield Resident(process, results, log)


@contextlib.contextmanager
def resident(
    engine: dict[str, Any], prompts: Sequence[Prompt], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Resident]:
    """One that is ready. Raises EngineFailed where it does not start."""
    with launched(engine, prompts, log, environment) as waiting:
        _ = waiting.about
        yield waiting


def run(
    engine: dict[str, Any],
    prompts: Sequence[Prompt],
    settings: Sequence[Setting],
    log: Path,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Measured]:
    """Yields one ``Measured`` per setting, of an engine that ends after the last."""
    with resident(engine, prompts, log, environment) as waiting:
        for setting in settings:
            yield waiting.measure(setting)


class Bench:
    """The child's side: a built engine and its prompts."""

    def __init__(self, llm: Any, prompts: Sequence[Prompt]) -> None:
        self.llm, self.prompts, self.asked = llm, list(prompts), 0
        runner = runner_of(llm)
        self.clock = StepClock(runner) if runner is not None else None
        self.about = {
            "runner": "unknown" if runner is None else "V2" if is_v2(runner) else "V1",
            "kv_cache_bytes": getattr(worker_of(llm), "available_kv_cache_memory_bytes", None),
        }

    def measure(self, setting: Setting) -> Measured:
        """One setting. The same code times plain and drafted decoding."""
        chosen = setting.chosen(self.prompts)
        self._answers(chosen[: setting.clients], setting, WARM_UP_TOKENS)
        seconds, tokens, answers, times = [], [], [], []
        if self.clock:
            self.clock.clear()
        before = Acceptance.from_llm(self.llm.get_metrics())
        for _ in range(setting.repeats):
            started = time.perf_counter()
            repetition = self._answers(chosen, setting, setting.max_tokens)
            seconds.append(time.perf_counter() - started)
            tokens.append(sum(len(answer.outputs[0].token_ids) for answer in repetition))
            times += [answer.metrics for answer in repetition]
            answers = answers or repetition
        return Measured(
            setting=setting,
            seconds=seconds,
            tokens=tokens,
            outputs=[list(answer.outputs[0].token_ids) for answer in answers],
            texts=[answer.outputs[0].text for answer in answers],
            acceptance=Acceptance.from_llm(self.llm.get_metrics()) - before,
            first_token_seconds=round(median(one.first_token_latency for one in times), 5),
            token_seconds=round(median(map(_token_seconds, times)), 6),
            steps=self.clock.read() if self.clock else None,
        )

    def _answers(self, prompts: Sequence[Prompt], setting: Setting, max_tokens: int) -> list[Any]:
        """Answers in the order of the prompts; as soon as one is whole the next prompt takes its place."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine, answers, waiting = self.llm.llm_engine, {}, list(enumerate(prompts))[::-1]
        first, self.asked = self.asked, self.asked + len(prompts)
        while len(answers) < len(prompts):
            while waiting and engine.get_num_unfinished_requests() < setting.clients:
                index, prompt = waiting.pop()
                how = SamplingParams(
                    temperature=setting.temperature,
                    max_tokens=max_tokens,
                    ignore_eos=setting.ignore_eos,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                )
                given = prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
                engine.add_request(str(first + index), given, how)
            for output in engine.step():
                if output.finished:
                    answers[int(output.request_id) - first] = output
        return [answers[index] for index in range(len(prompts))]


def _token_seconds(times: Any) -> float:
    """Time of each token after the first, of vLLM's clock of a request."""
    return (times.last_token_ts - times.first_token_ts) / max(1, times.num_generation_tokens - 1)


def main(arguments: Sequence[str]) -> None:
    """The child: ``JOB`` is the job's file, ``FD`` an open file for lines of JSON: about the engine, then one per pass.

    Settings come on standard input, a line of JSON each, until it ends.
    """
    job = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    from vllm import LLM

    bench = Bench(LLM(**{"disable_log_stats": False, **job["engine"]}), job["prompts"])
    with os.fdopen(int(arguments[1]), "w", encoding="utf-8") as results:
        print(json.dumps(bench.about), file=results, flush=True)
        for line in sys.stdin:
            print(json.dumps(bench.measure(Setting(**json.loads(line))).to_json()), file=results, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
