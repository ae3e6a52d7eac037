"""Hidden states of vLLM and of transformers: ``python -m benchmarks.served_states --json FILE``.

equality: the largest difference of a state of each family in float32, with the inputs of both layers where vLLM has
them. throughput: tokens/s of the demo target's states, in rounds of both. quantised: heads of the demo target in int8
and int4, trained on the served states and on those of the target before it was quantised; both are measured on text of
the quantised target. served: a head for int8 in vLLM and as the evaluator predicts it. Every part compares two sources.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.demo import corpus
from benchmarks.tiny_targets import FAMILIES, INT4, INT8, make_family, quantise
from vllm_mtpc import demo
from vllm_mtpc.cli import guard
from vllm_mtpc.cli import main as run_command
from vllm_mtpc.data.prompts import held_out
from vllm_mtpc.engine import provenance
from vllm_mtpc.engine.served_target import load_served_target
from vllm_mtpc.eval.evaluator import attach
from vllm_mtpc.eval.text import Sampling, generate
from vllm_mtpc.files import read_json
from vllm_mtpc.hf import load_target
from vllm_mtpc.report import check_file, print_table, write_json
from vllm_mtpc.train.options import parse
from vllm_mtpc.train.run import settled, train

PROG = "python -m benchmarks.served_states"
LAYERS = {"Llama": (0, 1), "Qwen3": (0, 1)}  # vLLM returns inputs of layers for these families
ENGINE = {"max_model_len": 1024, "max_num_batched_tokens": 4096}
DRAFTS = 7
PARTS = ["equality", "throughput", "quantised", "served"]
HEAD = {"circuit": "cp", "window": DRAFTS + 1, "components": 8, "head": "linear", "windows_per_step": 512}


def compare_equality(folder: Path) -> dict[str, Any]:
    """Return the largest differences by family; 100 texts of 2 to 100 tokens."""
    generator = torch.Generator().manual_seed(0)
    found: dict[str, Any] = {}
    for name in FAMILIES:
        made = make_family(name, folder / name)
        served, plain = load_served_target(made, torch.float32, "cpu", {"max_model_len": 128}), load_target(made)
        tokens = torch.randint(1, 48, (100, 100), generator=generator)
        documents = torch.zeros_like(tokens)
        for row in range(100):
            documents[row, row + 1 :] = 1  # two documents of another length in each row
        layers = LAYERS.get(name, ())
        states = served.hidden_with(layers, tokens, documents)
        known = states.abs().sum(-1) > 0  # the last state of a document is not computed
        differences = (states - plain.hidden_with(layers, tokens, documents))[known].abs()
        found[name] = {"states": int(known.sum()), "layers": list(layers), "difference": differences.max().item()}
        served.recorder.close()
    return found


def compare_throughput(rounds: int) -> dict[str, Any]:
    """Return tokens/s of the demo target's states by source, one number for each round."""
    folder, tokens = demo.path("target"), corpus.load().train.tokens[: 128 * 512].view(128, 512).long()
    documents = torch.zeros_like(tokens)
    served, plain = load_served_target(folder, torch.float32, "cpu", ENGINE), load_target(folder)
    sources: dict[str, Callable[[], object]] = {
        "transformers": lambda: [plain.hidden(*part) for part in zip(tokens.split(8), documents.split(8), strict=True)],
        "vLLM": lambda: served.hidden(tokens, documents),
    }
    rates: dict[str, list[float]] = {name: [] for name in sources}
    for number in range(rounds + 1):
        for name, compute in sources.items():
            started = time.monotonic()
            compute()
            if number:  # the first round starts the engine
                rates[name].append(round(tokens.numel() / (time.monotonic() - started), 1))
    served.recorder.close()
    return rates


def training_options(folder: Path, steps: int) -> dict[str, Any]:
    """Return the options of every training, on a million bytes of the demo's text."""
    data = folder / "text.txt"
    data.write_bytes(bytes(token for token in corpus.load().train.tokens[: 1 << 20].tolist() if token < 256))
    return {
        "data": [str(data)],
        "seq_len": 512,
        "target_dtype": "bfloat16",
        "max_steps": steps,
        "evaluation_sequences": 0,
        "block_rows": 32,
        **HEAD,
    }


def compare_quantised(folder: Path, steps: int, texts: int) -> dict[str, Any]:
    """Return tokens/step on the quantised target, by its bits, the states of training and the temperature."""
    source = demo.path("target")
    found: dict[str, Any] = {}
    shared = training_options(folder, steps)
    for bits, scheme in (("int8", INT8), ("int4", INT4)):
        target = folder / bits
        quantise(source, target, scheme)
        runs = {"vLLM": {"target": str(target), "engine": ENGINE, "verifier": "target"}}
        runs["unquantised"] = {"target": str(source), "verifier": "target"}
        for name, own in runs.items():
            train(settled(parse({**shared, **own, "out": folder / f"{bits}-{name}"})))
        served = load_served_target(target, torch.bfloat16, "cpu", ENGINE)
        tokenizer: Any = served.tokenizer
        prompts = [torch.tensor(tokenizer(text).input_ids[:64]) for text in held_out(texts)]
        found[bits] = {}
        for temperature in (0.0, 1.0):
            sampling = Sampling(temperature)
            samples = generate(served, prompts, 128, sampling, torch.Generator().manual_seed(1), overhang=DRAFTS)
            for name in runs:
                evaluator = attach(folder / f"{bits}-{name}", served)
                metrics = evaluator.metrics(evaluator.evaluate(samples, sampling, DRAFTS, 0))
                numbers = {"tokens_per_step": metrics.tokens_per_step, "standard_error": metrics.standard_error}
                found[bits].setdefault(name, {})[f"T={temperature:g}"] = numbers
        served.recorder.close()
    return found


def compare_served(folder: Path, steps: int) -> dict[str, Any]:
    """Return tokens/step of a head for the int8 target, served by vLLM and predicted, by temperature."""
    out, report = folder / "served", folder / "doctor.json"
    quantise(demo.path("target"), folder / "served-int8", INT8)
    options = {"target": str(folder / "served-int8"), "engine": ENGINE, "verifier": "../served-int8", "out": out}
    train(settled(parse({**training_options(folder, steps), **options})))
    run_command(["doctor", str(out), "--dtype", "bfloat16", "--prompts", "32", "--json", str(report)])
    found = read_json(report)
    return {"verdict": found["verdict"], "healthy": found["healthy"]}


def table(result: dict[str, Any]) -> str:
    """Return the numbers of a result as Markdown."""
    lines = ["| target, float32 | states compared | layers too | largest difference |", "|---" * 4 + "|"]
    lines += [
        f"| {name} | {one['states']:,} | {', '.join(map(str, one['layers'])) or 'none'} | {one['difference']:.1e} |"
        for name, one in result["equality"].items()
    ]
    lines += ["", "| states of | tokens/s | rounds |", "|---" * 3 + "|"]
    for name, rates in result["throughput"].items():
        lines.append(f"| {name} | {statistics.median(rates):,.0f} | {min(rates):,.0f} to {max(rates):,.0f} |")
    lines += ["", "| served target | states of training | tokens/step T=0 | T=1 |", "|---" * 4 + "|"]
    for bits, by_name in result["quantised"].items():
        lines += [f"| {bits} | {name} | {shown(one['T=0'])} | {shown(one['T=1'])} |" for name, one in by_name.items()]
    lines += ["", f"`vllm-mtpc doctor` of a head for int8: {result['served']['verdict']}"]
    return "\n".join([*lines, ""])


def shown(result: dict[str, float]) -> str:
    return f"{result['tokens_per_step']:.3f} ± {result['standard_error']:.3f}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=PARTS, metavar="PART")
    parser.add_argument("--rounds", type=int, default=5, help="of throughput")
    parser.add_argument("--steps", type=int, default=600, help="of a training")
    parser.add_argument("--texts", type=int, default=64, help="that a head is measured on")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    check_file(args.json)
    result: dict[str, Any] = {**provenance.collect(), "kind": "served states"}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if "equality" in args.parts:
            result["equality"] = compare_equality(folder)
            rows = [(name, str(one["states"]), f"{one['difference']:.1e}") for name, one in result["equality"].items()]
            print_table("equality", ("target", "states", "largest difference"), rows)
        if "throughput" in args.parts:
            result["throughput"] = compare_throughput(args.rounds)
            rates = result["throughput"].items()
            rows = [
                (name, f"{statistics.median(one):,.0f}", f"{min(one):,.0f} to {max(one):,.0f}") for name, one in rates
            ]
            print_table("throughput", ("states of", "tokens/s", "rounds"), rows)
        if "quantised" in args.parts:
            result["quantised"] = compare_quantised(folder, args.steps, args.texts)
            trained = [(bits, *one) for bits, by_name in result["quantised"].items() for one in by_name.items()]
            lines = [(bits, name, shown(by["T=0"]), shown(by["T=1"])) for bits, name, by in trained]
            print_table("quantised", ("target", "states of training", "tokens/step at T=0", "T=1"), lines)
        if "served" in args.parts:
            result["served"] = compare_served(folder, args.steps)
            print(result["served"]["verdict"])
    if args.json:
        write_json(args.json, result)
    return 0


if __name__ == "__main__":
    raise SystemExit(guard(PROG, main))
