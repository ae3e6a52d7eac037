"""Toy languages, a teacher of each, and PTP students trained on its text in seconds.

taxi     arXiv 2512.21323's taxi pick-ups among 25 neighbourhoods, in small. Symbol 5 a + b is a ride from
         district a ended in b; the next ride starts in b, and where it ends depends on a and b: one district with
         probability 0.4, the other four with 0.15 each. A token two places ahead depends on a choice that u alone
         tells.
coin     a start, a coin of eight sides that picks a phrase, the phrase's eight tokens, which all follow from it, and
         ends. u_1 is the coin: a student that reads it drafts the whole phrase at once. One that does not guesses
         the first step, right once in eight, and has the rest in the second: at most UNAWARE tokens/step, whatever
         its size.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from vllm_mtpc.data.rows import pack
from vllm_mtpc.data.sources import Documents
from vllm_mtpc.eval.ptp_evaluator import PtpMetrics, collect, summarise
from vllm_mtpc.eval.text import Samples, Sampling, generate
from vllm_mtpc.heads.ptp.student import Student
from vllm_mtpc.hf import Target
from vllm_mtpc.train.options import parse
from vllm_mtpc.train.ptp.ptp_trainer import PtpTrainer

HIDDEN = 64  # of the teacher
DISTRICTS, KEEP = 5, 0.4  # probability of the likeliest end of a ride
SIDES, PHRASE = 8, 8
START, END = SIDES * PHRASE, SIDES * PHRASE + 1
UNAWARE = PHRASE / (1 / SIDES + 2 * (1 - 1 / SIDES))
TEXTS, HELD_OUT = 400, 160  # to train on, and to measure on
TAUGHT = 24  # tokens of a text that the teacher learns from, at most


def taxi(count: int, length: int, seed: int) -> np.ndarray:
    """[count, length] symbols below 25."""
    rng = np.random.default_rng(seed)
    before, last = rng.integers(DISTRICTS, size=(2, count))
    steps = []
    for _ in range(length):
        usual = (last + 2 * before) % DISTRICTS
        other = (usual + rng.integers(1, DISTRICTS, size=count)) % DISTRICTS
        before, last = last, np.where(rng.random(count) < KEEP, usual, other)
        steps.append(DISTRICTS * before + last)
    return np.stack(steps, 1)


def coin(count: int, length: int, seed: int) -> np.ndarray:
    """[count, length] tokens: PHRASE c + j is the j-th of phrase c; START before it, END after it."""
    thrown = np.random.default_rng(seed).integers(SIDES, size=(count, 1))
    text = np.concatenate([np.full_like(thrown, START), PHRASE * thrown + np.arange(PHRASE)], 1)
    return np.pad(text, ((0, 0), (0, max(0, length - 1 - PHRASE))), constant_values=END)[:, :length]


@dataclass(frozen=True)
class Language:
    """The teacher's training text."""

    symbols: int
    write: Callable[[int, int, int], np.ndarray]
    steps: int  # of the teacher's training
    prompt: int  # tokens that are given
    length: int  # tokens of a text


LANGUAGES = {
    "taxi": Language(DISTRICTS**2, taxi, 250, 2, 48),
    "coin": Language(END + 1, coin, 500, 1, 1 + PHRASE),
}


class Toy(NamedTuple):
    """A language's teacher and its own text."""

    name: str
    teacher: Target
    documents: Documents
    held_out: Samples


def make(name: str, window: int) -> Toy:
    """A Llama that has learnt the language, and texts that it wrote, with `window` tokens after each."""
    language = LANGUAGES[name]
    teacher = make_teacher(language, name, 2)
    prompts = [torch.from_numpy(text) for text in language.write(TEXTS + HELD_OUT, language.prompt, 3)]
    more = {"overhang": window, "stops": set(), "batch": TEXTS}
    texts = [
        generate(teacher, some, language.length - len(some[0]), Sampling(), torch.Generator().manual_seed(seed), **more)
        for seed, some in enumerate((prompts[:TEXTS], prompts[TEXTS:]))
    ]
    written = texts[0].tokens[:, : language.length].numpy()
    return Toy(name, teacher, [(text, np.ones(len(text), bool)) for text in written], texts[1])


def train(toy: Toy, window: int, steps: int, trainer: type[PtpTrainer] = PtpTrainer, **changes: Any) -> Student:
    """A student of the teacher, trained by the package's own trainer; `changes`: options of vllm-mtpc train."""
    values = {
        "target": toy.name, "data": ["none"], "head": "ptp", "window": window, "u_features": 128,
        "lora_rank": 32, "lora_alpha": 32, "learning_rate": 4e-3, "gamma": 1.0, "max_steps": steps,
        "windows_per_step": 64, "seq_len": max(50, LANGUAGES[toy.name].length + 2), "block_rows": 32, "log_every": 100,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as out:
        options = parse(values | changes | {"out": Path(out)})
        run = trainer(options, toy.teacher, Accelerator(cpu=True))
        rows, _ = pack(toy.documents, options.seq_len, window, options.seed)
        run.setup(rows)
        run.train()
    return run.student.eval()


def measure(toy: Toy, student: Student) -> PtpMetrics:
    """Metrics on the teacher's held-out text."""
    return summarise(collect(student, toy.held_out, Sampling()))


def make_teacher(language: Language, name: str, layers: int) -> Target:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=language.symbols, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=512, attn_implementation="sdpa",
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, fused=True)
    length = min(TAUGHT, 3 * language.length // 2)
    tokens = torch.from_numpy(language.write(32 * language.steps, length, 1)).split(32)
    for step, batch in enumerate(tokens):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (1 - step / language.steps)
        logits = model(batch[:, :-1]).logits
        F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    model = model.eval().requires_grad_(False)
    return Target(name, model, None, model.model, model.lm_head, "torch")
