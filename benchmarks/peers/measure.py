"""Serve one decoding of peers.yaml to Spec-Bench: ``python -m benchmarks.peers.measure NAME --data FILE --json FILE``.

One engine in this process, float32, always with the largest number of drafts, answers the first turns of questions of
all six tasks, CLIENTS at once; steps and tokens are counted for each question, without the first token, which the
prompt's step yields. A row of the same name in FILE is replaced. ``--time`` adds milliseconds of steps and drafts to
that row, of some questions alone, and needs idle cores. Decodings of Model Runner V2 run by `scripts/v2_on_cpu.sh
python -m ...`; their kernels are interpreted, so they are not timed.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from safetensors.torch import load_file

from benchmarks.paper.spec_bench import CONVERSATION, TASKS, questions
from benchmarks.steps import watch
from vllm_mtpc.cli import guard
from vllm_mtpc.data.sources import chat_prompt
from vllm_mtpc.engine import provenance
from vllm_mtpc.errors import UsageError
from vllm_mtpc.files import read_json
from vllm_mtpc.report import Bar, check_file, write_json

PROG, PLAN = "python -m benchmarks.peers.measure", Path(__file__).with_name("peers.yaml")
TEMPERATURES, CLIENTS, ANSWER = (1.0, 0.0), 16, 64
QUESTIONS, LONGEST = 8, 768  # of each task; tokens of a prompt
ALONE, ALONE_TOKENS = 12, 24  # questions that are timed, and the length of their answers
SIZES = {"kv_cache_memory_bytes": 1 << 29, "max_model_len": 1024, "max_num_batched_tokens": 1024}


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__.splitlines()[0])
    parser.add_argument("name", help=f"of {PLAN.name}")
    parser.add_argument("--data", type=Path, required=True, metavar="FILE", help="jsonl of Spec-Bench")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="its other rows stay")
    parser.add_argument("--time", action="store_true", help="time the row that is in the file")
    args = parser.parse_args(words)
    return guard(PROG, lambda: run(args))


def run(args: argparse.Namespace) -> int:
    plan = yaml.safe_load(PLAN.read_text(encoding="utf-8"))
    if args.name not in plan["decodings"]:
        raise UsageError(f"{args.name} is not in {PLAN.name}; name one of {', '.join(plan['decodings'])}")
    check_file(args.json)
    kept = read_json(args.json) if args.json.exists() else {"rows": []}
    facts, decoding = provenance.collect(), plan["decodings"][args.name]
    if kept["rows"] and kept["commit"] != facts["commit"]:
        raise UsageError(f"--json {args.json} has rows of {kept['commit'][:8]}; name another file")
    row = {"name": args.name, **decoding, **training(decoding)}
    if args.time:
        row = next((one for one in kept["rows"] if one["name"] == args.name), None)
        if row is None:
            raise UsageError(f"--json {args.json} has no row {args.name}; measure it without --time first")
    engine = Engine(plan["target"], decoding)
    asked = choose(args.data, engine.llm.get_tokenizer())
    prompts = [prompt for _, prompt in asked]
    if args.time:
        row |= engine.time(prompts[:: len(asked) // ALONE])
    else:
        row["tasks"] = [task for task, _ in asked]
        for temperature in TEMPERATURES:
            found = engine.answer(prompts, temperature, ANSWER, f"{args.name}, T={temperature:g}")
            row[f"t{temperature:g}"] = [[one.tokens - 1, one.steps - 1] for one in found]
    rows = [*(one for one in kept["rows"] if one["name"] != args.name), row]
    how = {"dtype": "float32", "clients": CLIENTS, "tokens": ANSWER, "questions": QUESTIONS, "prompt_tokens": LONGEST}
    write_json(args.json, {"kind": "peers", **facts, "how": how, "rows": rows})
    return 0


def choose(data: Path, tokenizer: Any) -> list[tuple[str, list[int]]]:
    """Return tasks and prompts [tokens]: of each task questions at equal distances."""
    asked, chosen = questions(data), list[tuple[str, list[int]]]()
    for task in (CONVERSATION, *TASKS):
        turns = [one.turns[0] for one in asked if one.task == task]
        prompts = [chat_prompt([{"role": "user", "content": turn}], tokenizer) for turn in turns]
        short = [prompt for prompt in prompts if len(prompt) <= LONGEST]
        chosen += [(task, prompt) for prompt in short[:: len(short) // QUESTIONS][:QUESTIONS]]
    return chosen


def training(decoding: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters and minutes of a training: of a peer's run.json, or of our heads' provenance.json."""
    if "model" not in decoding.get("speculative_config", {}):
        return {"parameters": 0, "minutes": 0.0}
    folder = Path(decoding["speculative_config"]["model"])
    if (file := folder / "run.json").exists():
        run = read_json(file)
        return {"parameters": run["parameters"], "minutes": run["seconds"] / 60}
    stages = [Path(stage) for stage in decoding.get("after", [])] + [folder]
    minutes = sum(read_json(stage / "provenance.json")["run"]["minutes"] for stage in stages)
    tensors = [load_file(file).values() for file in folder.glob("*.safetensors")]
    return {"parameters": sum(one.numel() for values in tensors for one in values), "minutes": minutes}


class Counted:
    """An answer: its tokens and the steps that yielded them."""

    def __init__(self) -> None:
        self.tokens = self.steps = 0


class Engine:
    """vLLM in this process."""

    def __init__(self, target: str, decoding: dict[str, Any]) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM

        given = {"speculative_config": given} if (given := decoding.get("speculative_config")) else {}
        fixed = {"dtype": "float32", "enforce_eager": True, "enable_prefix_caching": False, "seed": 0}
        self.llm = LLM(target, **fixed, **SIZES, max_num_seqs=CLIENTS, **given)
        self.engine = self.llm.llm_engine
        self.draft_ms, self.step_ms = list[float](), list[float]()
        runner = self.engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        if hasattr(runner, "propose_draft_token_ids"):  # Model Runner V1
            runner.propose_draft_token_ids = partial(watch, runner.propose_draft_token_ids, self.draft_ms)

    def answer(self, prompts: list[list[int]], temperature: float, tokens: int, about: str) -> list[Counted]:
        """Return the counts of an answer to each prompt."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        counts = [Counted() for _ in prompts]
        for number, prompt in enumerate(prompts):
            # No seed of a request: vLLM 0.32 stops at one with a prompt in chunks, "CPU Generator does not use offset".
            kind = {"output_kind": RequestOutputKind.DELTA, "detokenize": False}
            sampling = SamplingParams(temperature=temperature, max_tokens=tokens, **kind)
            self.engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
        with Bar(total=len(prompts), desc=about, unit="answer") as bar:
            while self.engine.has_unfinished_requests():
                for output in watch(self.engine.step, self.step_ms):
                    one = counts[int(output.request_id)]
                    one.tokens, one.steps = one.tokens + len(output.outputs[0].token_ids), one.steps + 1
                    bar.update(int(output.finished))
        return counts

    def time(self, prompts: list[list[int]]) -> dict[str, Any]:
        """Return the median milliseconds of a step and of its draft, one request at a time."""
        steps, drafts = list[float](), list[float]()
        for prompt in prompts:
            self.draft_ms.clear()
            self.step_ms.clear()
            self.answer([prompt], 1.0, ALONE_TOKENS, "alone")
            steps += self.step_ms[1:]
            drafts += self.draft_ms[1:]
        return {"step_ms": median(steps), "draft_ms": median(drafts) if drafts else 0.0}


if __name__ == "__main__":
    sys.exit(main())
