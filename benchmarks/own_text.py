"""Text that the target writes alone, with its states: ``python -m benchmarks.own_text TARGET --tokens N --out FOLDER``.

The target writes user's turns as `vllm-mtpc regenerate --prompts self` does, then three answers to each at temperatures
of 0.6, 0.8, 1 and 0; unfinished answers are kept. ``--questions FILE`` (Spec-Bench's) has the first turns of that file
answered at 1 and 0 instead, with their tasks; with ``--temperature T`` each turn has one answer, at T. FOLDER has
`own.jsonl`, a line per answer; `states.bin`, float16 [tokens, D], the target's state before each token of the answers;
`norms.bin`, float32 [tokens], the log-sum of its logits. An interrupted run goes on with the next conversation. One
engine runs in this process, in float32; states cost nothing: logits need them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from vllm_mtpc.cli import guard
from vllm_mtpc.data.sources import chat_prompt
from vllm_mtpc.hf.model import target_tokenizer
from vllm_mtpc.regenerate.prompts import TEMPERATURES, RegenerateOptions, SelfPrompts
from vllm_mtpc.report import Bar

PROG = "python -m benchmarks.own_text"
TEXT_FILE, STATES_FILE, NORMS_FILE = "own.jsonl", "states.bin", "norms.bin"
SEQS, USER_TOKENS, ANSWERS, ANSWER_TOKENS, USER_TEMPERATURES = 96, 160, 3, 320, (0.7, 0.9)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__.splitlines()[0])
    parser.add_argument("target", help="folder or hub name of a chat model")
    parser.add_argument("--tokens", type=int, default=sys.maxsize, metavar="N", help="of the answers, at least")
    parser.add_argument("--questions", type=Path, metavar="FILE", help="JSON lines with `turns`; ends after the last")
    parser.add_argument("--temperature", type=float, metavar="T", help="of one answer to each turn")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="continued if it is there")
    args = parser.parse_args(arguments)
    return guard(PROG, lambda: write(args.target, args.tokens, args.questions, args.temperature, args.out))


class Recorder:
    """States and log-sums of the logits of every request of an engine in this process, by its id."""

    def __init__(self, runner: Any) -> None:
        self.runner, self.compute, self.rows = runner, runner.model.compute_logits, dict[str, list[Any]]()
        runner.model.compute_logits = self.compute_logits

    def compute_logits(self, states: Tensor, *args: Any) -> Tensor:
        logits, names = self.compute(states, *args), self.runner.input_batch.req_ids
        norms = logits.float().logsumexp(-1)
        for name, state, norm in zip(names, states.half(), norms.tolist(), strict=True):
            self.rows.setdefault(name, []).append((state.numpy().copy(), norm))
        return logits

    def take(self, name: str, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the last `count` states [count, D] and log-sums [count] of a request, and forget it."""
        rows = self.rows.pop(next(own for own in self.rows if own == name or own.startswith(f"{name}-")))[-count:]
        return np.stack([state for state, _ in rows]), np.array([norm for _, norm in rows], np.float32)


def read_lines(file: Path) -> list[str]:
    """Return the lines of a file."""
    return file.read_text(encoding="utf-8").splitlines()


def write(target: str, tokens: int, questions: Path | None, temperature: float | None, out: Path) -> int:
    """Append answers until there are this many tokens, or no more questions."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine runs in this process
    from vllm import LLM, SamplingParams

    out.mkdir(parents=True, exist_ok=True)
    tokenizer, file = target_tokenizer(target), out / TEXT_FILE
    writer = SelfPrompts(RegenerateOptions(target=target, prompts="self", limit=1, out=file), tokenizer)
    sizes = {"max_num_seqs": SEQS, "max_num_batched_tokens": 2048, "max_model_len": 2048}
    memory = {"kv_cache_memory_bytes": 3 << 30, "block_size": 32}
    lines = [json.loads(line) for line in read_lines(file)] if file.exists() else []
    # A seed of its own: a run that goes on would otherwise write the first run's text again.
    engine = LLM(target, dtype="float32", enforce_eager=True, seed=len(lines), **sizes, **memory).llm_engine
    recorder = Recorder(engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner)
    seen = {line["messages"][0]["content"].strip().lower() for line in lines}
    number = max((line["conversation"] for line in lines), default=-1) + 1
    asked = [json.loads(line) for line in read_lines(questions)] if questions else []
    done, live = sum(len(line["response_ids"]) for line in lines), dict[str, dict[str, Any]]()

    def ask(name: str, prompt: list[int], temperature: float, most: int, **facts: Any) -> None:
        live[name] = facts | {"prompt_ids": prompt, "temperature": temperature}
        sampling = SamplingParams(temperature=temperature, max_tokens=most, stop_token_ids=[writer.end])
        engine.add_request(name, {"prompt_token_ids": prompt}, sampling)

    def begin(number: int) -> None:
        if asked:
            return answer(number, asked[number]["turns"][0], task=asked[number].get("category", ""))
        ask(f"{number}/user", writer._parts([])[0], USER_TEMPERATURES[number % 2], USER_TOKENS, conversation=number)

    def answer(number: int, content: str, **facts: Any) -> None:
        messages = [{"role": "user", "content": content}]
        prompt, cycle = chat_prompt(messages, tokenizer), islice(TEMPERATURES * 2, number % 4, number % 4 + ANSWERS)
        chosen = (1.0, 0.0) if asked else cycle
        for one in chosen if temperature is None else [temperature]:
            ask(f"{number}/{one}", prompt, one, ANSWER_TOKENS, conversation=number, messages=messages, **facts)

    with (
        open(file, "a", encoding="utf-8") as text,
        open(out / STATES_FILE, "ab") as states,
        open(out / NORMS_FILE, "ab") as norms,
        Bar(total=None if asked else tokens, initial=done, desc="own text", unit="token") as bar,
    ):
        while bar.n < tokens:
            while len(live) <= SEQS - ANSWERS and number < (len(asked) or sys.maxsize):
                begin(number)
                number += 1
            if not live:
                break
            for request in engine.step():
                if not request.finished:
                    continue
                one, ids = live.pop(request.request_id), list(request.outputs[0].token_ids)
                reason = request.outputs[0].finish_reason
                found = recorder.take(request.request_id, len(ids))
                content = tokenizer.decode(ids, skip_special_tokens=True)
                if "messages" not in one:
                    key = content.strip().lower()
                    if not writer.fault(ids, reason) and key not in seen:
                        seen.add(key)
                        answer(one["conversation"], content.strip())
                elif not writer.fault(ids, "stop"):
                    states.write(found[0].tobytes())
                    norms.write(found[1].tobytes())
                    messages = [*one["messages"], {"role": "assistant", "content": content}]
                    line = one | {"response_ids": ids, "finish_reason": reason, "messages": messages}
                    text.write(json.dumps(line) + "\n")
                    for part in (states, norms, text):
                        part.flush()
                    bar.update(len(ids))
    return 0


if __name__ == "__main__":
    sys.exit(main())
