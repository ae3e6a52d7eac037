"""A step of Model Runner V1 and the draft inside it: ``python -m benchmarks.steps --target T --data FILE HEAD...``.

Every head and number of drafts K has an engine of its own, in a new process. A step is the worker's part, from its
inputs to the sampled tokens and the next drafts. The times are medians over the decoding steps of a pass, of the
fastest pass. Sampling at T=1; then the greedy answers are compared with plain vLLM's.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

from vllm_mtpc.cli import guard
from vllm_mtpc.engine import provenance
from vllm_mtpc.report import check_file, print_table, write_json

PROG = "python -m benchmarks.steps"
CLIENTS = (1, 4, 16)
PASSES = 3
TOKENS = 48
PROMPT_TOKENS = 128  # the last ones of a question in the chat template
HEADER = ("head", "K", "clients", "step ms", "draft ms", "of a step", "greedy answers of plain")


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
    """Measure one engine after the other."""
    check_file(args.json)
    named = dict(word.split("=", 1) for word in args.heads)
    jobs = [("plain", None, 0), (next(iter(named)), next(iter(named.values())), 0)]
    jobs += [(name, folder, drafts) for name, folder in named.items() for drafts in args.drafts]
    rows: list[dict[str, Any]] = []
    plain = None
    for name, folder, drafts in jobs:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            times, answers = pool.submit(measure, args.target, args.data, folder, drafts).result()
        plain = plain or answers
        equal = sum(ours == theirs for ours, theirs in zip(answers, plain, strict=True))
        for row in times:
            rows.append({"head": name, "drafts": drafts, **row, "identical": equal, "answers": len(answers)})
            print(json.dumps(rows[-1]), flush=True)
        if args.json:
            how = {"dtype": "float32", "tokens": TOKENS, "passes": PASSES}
            write_json(args.json, {"kind": "steps", **provenance.collect(), "how": how, "rows": rows})
    print_table("a step and its draft", HEADER, [line(row) for row in rows])
    return 0


def line(row: dict[str, Any]) -> list[str]:
    """Format a row of the table."""
    times = [f"{row['step_ms']:.1f}", f"{row['draft_ms']:.1f}", f"{row['draft_ms'] / row['step_ms']:.1%}"]
    return [row["head"], str(row["drafts"]), str(row["clients"]), *times, f"{row['identical']} of {row['answers']}"]


def measure(target: str, data: Path, head: str | None, drafts: int) -> tuple[list[dict[str, float]], list[list[int]]]:
    """Return the times by number of clients, and the greedy answers; `drafts` is the same in every step."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    given: dict[str, Any] = {}
    if head:
        plan = "off" if drafts else [[1, 256, 0]]
        given = {"method": "mtpc", "model": head, "num_speculative_tokens": max(drafts, 1)}
        given = {"speculative_config": given | {"num_speculative_tokens_per_batch_size": plan}}
    sizes = {"kv_cache_memory_bytes": 1 << 30, "max_model_len": 1024, "max_num_seqs": max(CLIENTS)}
    llm = LLM(target, dtype="float32", enforce_eager=True, enable_prefix_caching=False, **sizes, **given)
    prompts = questions(data, llm.get_tokenizer())
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    steps, inside = watch_steps(runner, is_plain=head is None), list[float]()
    if drafts:
        runner.drafter._generate_drafts = partial(watch, runner.drafter._generate_drafts, inside)
    rows = []
    for clients in CLIENTS:
        found = []
        for _ in range(PASSES):
            steps.clear()
            inside.clear()
            sampling = SamplingParams(temperature=1.0, max_tokens=TOKENS, ignore_eos=True)
            llm.generate(prompts[:clients], sampling, use_tqdm=False)
            found.append((median(one for one in steps if not math.isnan(one)), median(inside) if inside else 0.0))
        step, draft = min(found)
        rows.append({"clients": clients, "step_ms": round(step, 2), "draft_ms": round(draft, 2)})
    answers = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=TOKENS), use_tqdm=False)
    return rows, [list(answer.outputs[0].token_ids) for answer in answers]


def watch_steps(runner: Any, is_plain: bool) -> list[float]:
    """Return a list that gets the milliseconds of every step; nan for one that reads a prompt."""
    steps: list[float] = []

    def execute(scheduled: Any, *given: Any, call: Callable[..., Any] = runner.execute_model) -> Any:
        result = watch(call, steps, scheduled, *given)
        if scheduled.scheduled_new_reqs or not scheduled.total_num_scheduled_tokens:
            steps[-1] = math.nan
        return result

    def sample(*given: Any, call: Callable[..., Any] = runner.sample_tokens) -> Any:
        result = watch(call, steps, *given)
        steps[-2:] = [sum(steps[-2:])]
        return result

    runner.execute_model = execute
    if is_plain:  # a call of its own, with a head a part of the other
        runner.sample_tokens = sample
    return steps


def questions(data: Path, tokenizer: Any) -> list[dict[str, list[int]]]:
    """Return questions of all tasks, as prompts."""
    lines = [json.loads(text) for text in data.read_text(encoding="utf-8").splitlines()]
    chosen = lines[:: len(lines) // max(CLIENTS)][: max(CLIENTS)]
    given = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    turns = [[{"role": "user", "content": line["turns"][0]}] for line in chosen]
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
