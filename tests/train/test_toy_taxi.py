"""The paper's question at the size of a test: do rows that are told u draft further than rows that are not?

As in arXiv 2512.21323 (taxi pick-ups among 25 neighbourhoods): symbol 5 a + b says that a ride from district a ended in
b, the next ride starts in b, and where it ends depends on a and b: one district with probability 0.4, the other four
with 0.15 each. So the next symbol depends on the last one through both its parts, and a token two places ahead depends
on a choice that u alone tells.

A small Llama learns the rides and is the teacher; students with and without u are trained alike on its text, through
the package's own trainer, and judged by the drafts that are right before the first that is not, of 11. Over 200 steps
the student with u reached 1.61 of them, the one without 0.04, forty times less. No independent prediction can reach
0.27: its first draft is right with probability 0.4 x 0.4 at most, each further one with 0.4.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from vllm_mtpc.data.rows import pack
from vllm_mtpc.data.sources import Documents
from vllm_mtpc.eval.ptp_acceptance import measure_ptp
from vllm_mtpc.eval.text import Sampling, generate
from vllm_mtpc.heads.ptp.student import Student
from vllm_mtpc.hf import Target
from vllm_mtpc.train.loop import Trainer
from vllm_mtpc.train.options import parse
from vllm_mtpc.train.ptp.run import PtpJob

SYMBOLS, WINDOW, LENGTH, KEEP, STEPS = 25, 12, 48, 0.4, 200
WHOLE = {"overhang": WINDOW, "stops": set(), "batch": 400}


def walks(count: int, length: int, seed: int) -> np.ndarray:
    """[count, length] symbols."""
    rng = np.random.default_rng(seed)
    before, last = rng.integers(5, size=(2, count))
    steps = []
    for _ in range(length):
        usual = (last + 2 * before) % 5
        other = (usual + rng.integers(1, 5, size=count)) % 5
        before, last = last, np.where(rng.random(count) < KEEP, usual, other)
        steps.append(5 * before + last)
    return np.stack(steps, 1)


def make_teacher(steps: int = 250) -> Target:
    """A Llama of two layers that has learnt the walk."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=SYMBOLS, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=128, attn_implementation="sdpa",
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, fused=True)
    tokens = torch.from_numpy(walks(32 * steps, 24, seed=1)).split(32)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (1 - step / steps)
        logits = model(tokens[step][:, :-1]).logits
        F.cross_entropy(logits.flatten(0, 1), tokens[step][:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    model = model.eval().requires_grad_(False)
    return Target("taxi", model, None, model.model, model.lm_head, "torch")


def train(teacher: Target, documents: Documents, out: Path, informed: bool) -> Student:
    values = {
        "target": "taxi", "data": ["none"], "out": out, "head": "ptp", "informed": informed, "window": WINDOW,
        "u_embedding": "threshold", "lora_rank": 32, "lora_alpha": 64, "learning_rate": 1e-2, "gamma": 1.0,
        "max_steps": STEPS, "windows_per_step": 64, "seq_len": LENGTH + 2, "block_rows": 32, "log_every": 100,
    }  # fmt: skip
    options = parse(values)
    job = PtpJob(options, teacher)
    rows, _ = pack(documents, options.seq_len, WINDOW, options.seed)
    windows = job.windows(job.source(rows), 0, 1)
    Trainer(options, Accelerator(cpu=True), job.drafter(), windows, STEPS).run()
    return job.student.eval()


def test_rows_that_are_told_u_draft_further(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    teacher = make_teacher()
    prompts = [torch.from_numpy(walk) for walk in walks(460, 2, seed=3)]
    text = [
        generate(teacher, some, LENGTH - WINDOW, Sampling(), torch.Generator().manual_seed(seed), **WHOLE)
        for seed, some in enumerate((prompts[:400], prompts[400:]))
    ]
    documents = Documents.join([(walk, np.ones(len(walk), bool)) for walk in text[0].tokens.numpy()])
    found = {}
    for informed in (True, False):
        student = train(teacher, documents, tmp_path / str(informed), informed)
        found[informed] = measure_ptp(student, text[1], Sampling(), num_drafts=WINDOW - 1)
    right, other = (found[informed].anywhere - 1 for informed in (True, False))
    assert right > 1 and right > 4 * other and other < 0.27
    assert found[True].shuffled_accuracy < 0.3 * found[True].accuracy
    assert found[False].shuffled_accuracy == found[False].accuracy
