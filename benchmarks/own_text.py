"""Text that the target writes alone, with its states: ``python -m benchmarks.own_text TARGET --tokens N --out FOLDER``.

The prompts are those of `vllm-mtpc regenerate --prompts self` with other temperatures of the user's turns; unfinished
answers are kept. FOLDER has `own.jsonl`, a line per answer; `states.bin`, float16 [tokens, D], the target's state
before each token of the answers; `norms.bin`, float32 [tokens], the log-sum of its logits. An interrupted run goes on
with the next conversation. One engine runs in this process, in float32; states cost nothing: logits need them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from vllm_mtpc.batch.options import TEMPERATURES, RegenerateOptions
from vllm_mtpc.batch.self_prompts import SECOND_TURN, SelfPrompts
from vllm_mtpc.cli import guard
from vllm_mtpc.data.sources import chat_prompt
from vllm_mtpc.hf.model import target_tokenizer
from vllm_mtpc.progress import Bar

PROG = "python -m benchmarks.own_text"
TEXT_FILE, STATES_FILE, NORMS_FILE = "own.jsonl", "states.bin", "norms.bin"
SEQS, USER_TOKENS, ANSWER_TOKENS, USER_TEMPERATURES = 96, 160, 320, (0.7, 0.9)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__.splitlines()[0])
    parser.add_argument("target", help="folder or hub name of a chat model")
    parser.add_argument("--tokens", type=int, required=True, metavar="N", help="of the answers, at least")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="continued if it is there")
    args = parser.parse_args(arguments)
    return guard(PROG, lambda: write(args.target, args.tokens, args.out))


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


def write(target: str, tokens: int, out: Path) -> int:
    """Append answers until there are this many tokens."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine runs in this process
    from vllm import LLM, SamplingParams

    out.mkdir(parents=True, exist_ok=True)
    tokenizer, file = target_tokenizer(target), out / TEXT_FILE
    writer = SelfPrompts(RegenerateOptions(target=target, prompts="self", limit=1, out=file), tokenizer)
    sizes = {"max_num_seqs": SEQS, "max_num_batched_tokens": 2048, "max_model_len": 2048}
    memory = {"kv_cache_memory_bytes": 3 << 30, "enable_prefix_caching": False}
    engine = LLM(target, dtype="float32", enforce_eager=True, **sizes, **memory).llm_engine
    recorder = Recorder(engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner)
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
    seen = {line["messages"][-2]["content"].strip().lower() for line in lines}
    number = max((line["conversation"] for line in lines), default=-1) + 1
    done, live = sum(len(line["response_ids"]) for line in lines), dict[str, dict[str, Any]]()

    def ask(one: dict[str, Any]) -> None:
        messages, at = one["messages"], one["number"]
        one["is_user"] = len(messages) % 2 == 0
        if one["is_user"]:
            one["prompt"], how = writer._parts(messages)[0], {"temperature": USER_TEMPERATURES[at % 2]}
            how["max_tokens"] = USER_TOKENS
        else:
            one["prompt"] = chat_prompt(messages, tokenizer)
            how = {"temperature": TEMPERATURES[at % len(TEMPERATURES)], "max_tokens": ANSWER_TOKENS}
        one["temperature"] = how["temperature"]
        name = f"{at}/{len(messages)}"
        live[name] = one
        sampling = SamplingParams(**how, stop_token_ids=[writer.end])
        engine.add_request(name, {"prompt_token_ids": one["prompt"]}, sampling)

    with (
        open(file, "a", encoding="utf-8") as text,
        open(out / STATES_FILE, "ab") as states,
        open(out / NORMS_FILE, "ab") as norms,
        Bar(total=tokens, initial=done, desc="own text", unit="token") as bar,
    ):
        while bar.n < tokens:
            while len(live) < SEQS:
                ask({"number": number, "messages": [], "turns": 1 if number % SECOND_TURN else 2})
                number += 1
            for request in engine.step():
                if not request.finished:
                    continue
                one, ids = live.pop(request.request_id), list(request.outputs[0].token_ids)
                reason = request.outputs[0].finish_reason
                found = recorder.take(request.request_id, len(ids))
                content = tokenizer.decode(ids, skip_special_tokens=True)
                content = content.strip() if one["is_user"] else content
                key = content.lower() if one["is_user"] else None
                if writer.fault(ids, reason if one["is_user"] else "stop") or key in seen:
                    continue
                one["messages"] = [*one["messages"], {"role": "user" if key else "assistant", "content": content}]
                if key:
                    seen.add(key)
                else:
                    states.write(found[0].tobytes())
                    norms.write(found[1].tobytes())
                    line = {"prompt_ids": one["prompt"], "response_ids": ids, "finish_reason": reason}
                    line |= {"temperature": one["temperature"], "conversation": one["number"]}
                    text.write(json.dumps(line | {"messages": one["messages"]}) + "\n")
                    for part in (states, norms, text):
                        part.flush()
                    bar.update(len(ids))
                if one["is_user"] or (reason == "stop" and len(one["messages"]) < 2 * one["turns"]):
                    ask(one)
    return 0


if __name__ == "__main__":
    sys.exit(main())
