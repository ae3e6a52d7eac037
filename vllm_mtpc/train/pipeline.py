"""What ``scripts/train_demo.sh`` runs: target, then heads, each with its evaluation, card and provenance."""

import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm_mtpc import demo
from vllm_mtpc.checkpoint import load_head, save_head
from vllm_mtpc.checkpoint.save import package_versions, replace_file
from vllm_mtpc.config import HeadConfig
from vllm_mtpc.train import cards, corpus, evaluate, heads, samples, target

WINDOW, COMPONENTS = 8, 8
EVALUATION_SEEDS = {"t1": 101, "t0": 102}


@dataclass(frozen=True)
class Plan:
    """How much of everything; what is recorded beside the figures."""

    steps: int = target.STEPS
    long_steps: int = target.LONG_STEPS
    head_steps: int = heads.STEPS
    sequences_t1: int = 2048  # of the target's own text, sampled
    sequences_t0: int = 512  # greedy
    sequences_corpus: int = 1024
    new_tokens: int = 128
    evaluation_sequences: int = 256
    evaluation_tokens: int = 96
    loss_bytes: int = 131072  # of held-out text, evenly spread, for bits per byte


QUICK = Plan(20, 2, 20, 16, 8, 8, 32, 16, 32, 4096)


def run_target(text: corpus.Corpus, folder: Path, plan: Plan, command: str) -> None:
    """Trains and saves the target."""
    started = time.monotonic()
    target.save(target.train(text, plan.steps, plan.long_steps), folder)
    describe_target(text, folder, plan, command, (time.monotonic() - started) / 60)


def describe_target(text: corpus.Corpus, folder: Path, plan: Plan, command: str, minutes: float) -> None:
    """Measures the saved target and writes its card and provenance."""
    model = target.load(folder)
    figures = {
        "bits_per_byte": target.bits_per_byte(model, text.valid, target.SHORT, plan.loss_bytes),
        "bits_per_byte_long": target.bits_per_byte(model, text.valid, target.LONG, plan.loss_bytes),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "minutes": round(minutes, 1),
    }
    settings = {
        "steps": plan.steps,
        "long_steps": plan.long_steps,
        "tokens_per_step": target.TOKENS_PER_STEP,
        "short_window": target.SHORT,
        "long_window": target.LONG,
        "loss_bytes": plan.loss_bytes,
    }
    record = {"versions": package_versions(), **cards.provenance(text, command, target.SEED, figures, settings)}
    replace_file(folder / "README.md", cards.target_card(record).encode())
    replace_file(folder / "provenance.json", (json.dumps(record, indent=2) + "\n").encode())
    print(f"target: {figures['bits_per_byte']:.4f} bits/byte on held-out text, {minutes:.1f} minutes")


def training_text(model: torch.nn.Module, text: corpus.Corpus, plan: Plan) -> samples.Samples:
    """What heads are trained on: text of the target, sampled and greedy, and as much of the corpus."""
    drawn = samples.generate(model, text.train, plan.sequences_t1, plan.new_tokens, 1.0, seed=1)
    greedy = samples.generate(model, text.train, plan.sequences_t0, plan.new_tokens, 0.0, seed=2)
    found = samples.read(model, text.train, plan.sequences_corpus, samples.PROMPT + plan.new_tokens, seed=3)
    return samples.join([drawn, greedy, found])


def evaluation_text(model: torch.nn.Module, text: corpus.Corpus, plan: Plan) -> dict[str, samples.Samples]:
    """Continuations of held-out prompts, by temperature."""
    count, length = plan.evaluation_sequences, plan.evaluation_tokens
    return {
        name: samples.generate(model, text.valid, count, length, float(name == "t1"), seed)
        for name, seed in EVALUATION_SEEDS.items()
    }


def run_heads(text: corpus.Corpus, out: Path, plan: Plan, command: str) -> None:
    """Trains, saves, reloads and evaluates a head per circuit; the figures are those of the saved weights."""
    model = target.load(out / "target")
    lm_head = model.lm_head.weight
    bits = json.loads((out / "target" / "provenance.json").read_text())["figures"]["bits_per_byte"]
    trained_on, evaluated_on = training_text(model, text, plan), evaluation_text(model, text, plan)
    settings = {
        "steps": plan.head_steps,
        "windows_per_step": heads.WINDOWS_PER_STEP,
        "learning_rate": heads.LEARNING_RATE,
        "gamma": heads.GAMMA,
        "sequences_t1": plan.sequences_t1,
        "sequences_t0": plan.sequences_t0,
        "sequences_corpus": plan.sequences_corpus,
        "prompt": samples.PROMPT,
        "new_tokens": plan.new_tokens,
    }
    for circuit in demo.HEADS:
        components = 1 if circuit == "ff" else COMPONENTS
        config = HeadConfig.create(
            circuit=circuit, window=WINDOW, num_components=components, target=model.config, verifier="../target"
        )
        started = time.monotonic()
        head = heads.train(config, lm_head, trained_on, plan.head_steps, heads.WINDOWS_PER_STEP)
        minutes = (time.monotonic() - started) / 60
        folder = out / circuit
        save_head(folder, config, head, {}, "")
        _, head = load_head(folder)
        figures: dict = {"target_bits_per_byte": bits, "minutes": round(minutes, 1)}
        for name, data in evaluated_on.items():
            figures[name] = evaluate.measure(head, lm_head, data, greedy=name == "t0").as_dict()
        record = cards.provenance(text, command, heads.SEED, figures, settings)
        # Saving the reloaded head again writes the very same weights, now with the figures.
        save_head(folder, config, head, record, cards.head_card(record, circuit, WINDOW, components))
        summary = ", ".join(
            f"T={name[1]} {value['tokens_per_step']:.3f} ± {value['standard_error']:.3f}"
            for name, value in ((name, figures[name]) for name in evaluated_on)
        )
        print(f"{circuit}: tokens/step {summary}; {minutes:.1f} minutes", flush=True)


def run(only: str | None, quick: bool, out: Path, threads: int) -> None:
    """Trains what ``only`` names (everything if None) and writes it below ``out``."""
    if threads:
        torch.set_num_threads(threads)
    plan = QUICK if quick else Plan()
    command = " ".join(["scripts/train_demo.sh", *(["--only", only] if only else []), *(["--quick"] if quick else [])])
    text = corpus.load()
    print(f"corpus: {text.files} files, {text.bytes} bytes, sha256 {text.sha256}", flush=True)
    if only != "heads":
        run_target(text, out / "target", plan, command)
    if only != "target":
        if not (out / "target" / "provenance.json").is_file():
            raise ValueError(f"{out / 'target'} holds no trained target: run scripts/train_demo.sh --only target first")
        run_heads(text, out, plan, command)
