"""A step of Model Runner V1 and the draft inside it: ``python -m benchmarks.steps --target T --data FILE HEAD...``.

Plain vLLM and every head with each number of drafts K have engines in this process, which take turns: in a round each
answers the same questions, in the next one in the opposite order. A step is all that the engine does, from the schedule
to the tokens. Of a round's decoding steps the median counts; `ratio` has the quartiles over the rounds of that median
over plain vLLM's in the same round: a slow minute of the machine slows both. The greedy answers are compared as well.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from vllm_mtpc.cli import guard
from vllm_mtpc.engine import provenance
from vllm_mtpc.report import Bar, check_file, print_table, write_json

PROG = "python -m benchmarks.steps"
ROUNDS = {1: 16, 4: 12, 16: 8}  # by number of clients
TOKENS = 16
PROMPT_TOKENS = 64  # the last ones of a question in the chat template
HEADER = ("head", "K", "clients", "step ms", "draft ms", "times plain's step", "greedy answers of plain")


def main(words: list[str] | None = None) -> int:
    """Time plain vLLM and every head; print a table and write JSON."""
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__.splitlines()[0])
    parser.add_argument("heads", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--target", required=True, metavar="MODEL")
    parser.add_argument("--data", required=True, type=Path, metavar="FILE", help="jsonl of Spec-Bench")
    parser.add_argument("--drafts", nargs="+", type=int, default=[1, 3, 5], metavar="K")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(words)
    return guard(PROG, lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """Start all engines and measure them in turns."""
    check_file(args.json)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    engines = [Engine(args.target, "plain", None, 0)]
    for word in args.heads:
        name, folder = word.split("=", 1)
        engines += [Engine(args.target, name, folder, drafts) for drafts in [0, *args.drafts]]
    prompts, rows = questions(args.data, engines[0].llm.get_tokenizer()), list[dict[str, Any]]()
    for clients, rounds in ROUNDS.items():
        steps = np.zeros((len(engines), rounds))
        for number in Bar(range(rounds), desc=f"{clients} clients", unit="round"):
            asked = [prompts[(number * clients + i) % len(prompts)] for i in range(clients)]
            for index in range(len(engines))[:: 1 if number % 2 else -1]:
                steps[index, number] = engines[index].step_ms(asked)
        for engine, times in zip(engines, steps, strict=True):
            ratio = np.quantile(times / steps[0], (0.25, 0.5, 0.75)).round(3).tolist()
            draft = round(median(engine.draft_ms), 2) if engine.draft_ms else 0.0
            engine.draft_ms.clear()
            step = {"clients": clients, "step_ms": round(float(np.median(times)), 2), "draft_ms": draft, "ratio": ratio}
            rows.append({"head": engine.name, "drafts": engine.drafts, **step})
    answers = [engine.answer(prompts[: max(ROUNDS)], 3 * TOKENS) for engine in engines]
    for row, own in zip(rows, answers * len(ROUNDS), strict=True):
        equal = sum(ours == plain for ours, plain in zip(own, answers[0], strict=True))
        row |= {"identical": equal, "answers": len(own)}
    if args.json:
        how = {"dtype": "float32", "tokens": TOKENS, "rounds": ROUNDS}
        write_json(args.json, {"kind": "steps", **provenance.collect(), "how": how, "rows": rows})
    print_table("a step and its draft", HEADER, [line(row) for row in rows])
    return 0


def line(row: dict[str, Any]) -> list[str]:
    """Format a row of the table."""
    low, middle, high = row["ratio"]
    times = [f"{row['step_ms']:.1f}", f"{row['draft_ms']:.1f}", f"{middle:.2f} [{low:.2f}, {high:.2f}]"]
    return [row["head"], str(row["drafts"]), str(row["clients"]), *times, f"{row['identical']} of {row['answers']}"]


class Engine:
    """One engine in this process, with the same number of drafts in every step."""

    def __init__(self, target: str, name: str, head: str | None, drafts: int) -> None:
        from vllm import LLM

        given: dict[str, Any] = {}
        if head:
            plan = "off" if drafts else [[1, 256, 0]]
            given = {"method": "mtpc", "model": head, "num_speculative_tokens": max(drafts, 1)}
            given = {"speculative_config": given | {"num_speculative_tokens_per_batch_size": plan}}
        sizes = {"kv_cache_memory_bytes": 300 << 20, "max_model_len": 512, "max_num_seqs": max(ROUNDS)}
        self.llm = LLM(target, dtype="float32", enforce_eager=True, enable_prefix_caching=False, **sizes, **given)
        self.name, self.drafts, self._steps, self.draft_ms = name, drafts, list[float](), list[float]()
        engine = self.llm.llm_engine
        engine.step = partial(watch, engine.step, self._steps)
        if drafts:
            drafter = engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.drafter
            drafter._generate_drafts = partial(watch, drafter._generate_drafts, self.draft_ms)

    def step_ms(self, prompts: list[dict[str, list[int]]]) -> float:
        """Return the median milliseconds of the steps after the first, which reads the prompts."""
        self._steps.clear()
        self.answer(prompts, TOKENS)
        return median(self._steps[1 : 1 + TOKENS // 2])

    def answer(self, prompts: list[dict[str, list[int]]], tokens: int) -> list[list[int]]:
        """Return the ids of a greedy answer of `tokens` tokens to each prompt."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        answers = self.llm.generate(prompts, sampling, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]


def questions(data: Path, tokenizer: Any) -> list[dict[str, list[int]]]:
    """Return questions of all tasks, as prompts."""
    lines = [json.loads(text) for text in data.read_text(encoding="utf-8").splitlines()][::7]
    given = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    turns = [[{"role": "user", "content": line["turns"][0]}] for line in lines]
    ids = [tokenizer.apply_chat_template(turn, **given)["input_ids"] for turn in turns]
    return [{"prompt_token_ids": one[-PROMPT_TOKENS:]} for one in ids]


def watch(call: Callable[..., Any], times: list[float], *given: Any, **named: Any) -> Any:
    """Call, and append the milliseconds to `times`."""
    started = time.perf_counter()
    result = call(*given, **named)
    times.append(1000 * (time.perf_counter() - started))
    return result


if __name__ == "__main__":
    sys.exit(main())
