"""Circuits on a native MTP layer: ``python -m benchmarks.hosted --data DATA... --json FILE``.

The demo's byte target gets one MTP layer as DeepSeek-V3's, trained here on x_2 alone and then frozen. Compared on the
same held-out texts: native recursion, which runs the layer and the lm_head once per draft, and heads of kind `hosted`,
which run the layer once. The heads learn from the same states, windows and steps.

products: multiplications of a step's draft for one request, attention to the text left out.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from benchmarks.backbone import learn, measured, states_of
from vllm_mtpc import demo
from vllm_mtpc.cli import guard
from vllm_mtpc.engine import provenance
from vllm_mtpc.engine.counters import DEFINITIONS
from vllm_mtpc.eval.text import with_drafter
from vllm_mtpc.heads.backbone import Layer
from vllm_mtpc.heads.hosted import DRAFTER
from vllm_mtpc.hf import Target, load_target
from vllm_mtpc.hf.attention import document_positions
from vllm_mtpc.progress import Bar
from vllm_mtpc.report import check_file, print_table, write_json
from vllm_mtpc.train.options import TrainOptions, parse
from vllm_mtpc.train.run import read_data
from vllm_mtpc.train.trainer import held_out_prompts

PROG = "python -m benchmarks.hosted"
COMPONENTS, COMPONENT_RANK, EXPANDER_RANK, TOKEN_RANK = 8, 32, 64, 32
WIDTH, ROWS, RATE = 512, 16, 3e-3  # of the MTP layer: its MLP, the rows of a step, the peak learning rate
WINDOWS, PASSES = 256, 2  # of a step of a head, and over the windows


class MtpLayer(nn.Module):
    """s_t = layer(eh_proj [norm E(x_{t+1}), norm h_t]); norm(s_t) predicts x_{t+2}."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.config, size = target.config, target.hidden_size
        heads, eps = (self.config.num_attention_heads, self.config.num_key_value_heads), self.config.rms_norm_eps
        self.layer = Layer(size, *heads, self.config.head_dim, WIDTH, eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.enorm, self.hnorm, self.norm = (nn.RMSNorm(size, eps) for _ in range(3))

    def passes(self, target: Target, tokens: Tensor, documents: Tensor, hidden: Tensor, count: int) -> list[Tensor]:
        """Return the normalised states [R, S, D] after 1 .. count passes of every position t.

        Pass j reads x_{t+j} and the state of pass j - 1, as vLLM's own drafts do along the text; its keys are those of
        the first pass up to t and of the earlier passes at t.
        """
        length, position, states = tokens.shape[1], document_positions(documents), hidden
        at = torch.arange(length)
        prefix = (documents[:, :, None] == documents[:, None]) & (at[:, None] >= at)
        own, found = torch.eye(length, dtype=torch.bool).expand_as(prefix), list[Tensor]()
        keys = values = hidden.new_zeros(len(tokens), self.config.num_key_value_heads, 0, self.config.head_dim)
        for number in range(1, count + 1):
            read = tokens[:, (at + number).clamp(max=length - 1)]
            rows = self.eh_proj(torch.cat([self.enorm(target.embed(read)), self.hnorm(states)], -1))
            half = torch.arange(0, self.config.head_dim, 2) / -self.config.head_dim
            rope = (position + number - 1)[..., None] * self.config.rope_parameters["rope_theta"] ** half
            mask = torch.cat([prefix, *[own] * (number - 1)], -1)[:, None]
            states = self.layer(rows, rope, (keys, values), mask)
            more = self.layer.self_attn.keys_values(self.layer.input_layernorm(rows), rope)
            keys, values = torch.cat([keys, more[0]], 2), torch.cat([values, more[1]], 2)
            found.append(self.norm(states))
        return found


class MtpTarget(Target):
    """A target with an MTP layer, whose states it returns as vLLM's engine does."""

    mtp: MtpLayer

    @torch.no_grad()
    def hidden_with(self, layers: Any, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        assert list(layers) == [DRAFTER]
        documents, hidden = torch.zeros_like(tokens) if documents is None else documents, self.hidden(tokens, documents)
        return torch.cat([*self.mtp.passes(self, tokens, documents, hidden, 1), hidden], -1)


def train_layer(target: MtpTarget, rows: Any, steps: int) -> None:
    """Train the MTP layer on KL(p || q) of x_{t+2}."""
    target.mtp = MtpLayer(target)
    optimizer = torch.optim.AdamW(target.mtp.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    with Bar(total=steps, desc="MTP layer", unit="step") as bar:
        for _ in range(steps):
            some = torch.randint(len(rows.tokens), (ROWS,))
            tokens, documents = rows.tokens[some].long(), rows.document[some]
            hidden = target.hidden(tokens, documents)
            (states,) = target.mtp.passes(target, tokens, documents, hidden, 1)
            kept = (documents[:, :-2] == documents[:, 2:]) & (documents[:, 2:] >= 0)
            q = target.logits(states[:, :-2][kept]).log_softmax(-1)
            p = target.logits(hidden[:, 1:-1][kept]).log_softmax(-1)
            loss = F.kl_div(q, p, log_target=True, reduction="batchmean")
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(target.mtp.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
            bar.update()
    target.mtp.requires_grad_(False)


def options_of(args: argparse.Namespace, window: int, circuit: str, token_rank: int, seed: int) -> TrainOptions:
    values = {
        "target": str(demo.path("target")), "data": args.data, "out": "none", "head": "hosted", "drafter": "mtp",
        "circuit": circuit, "window": window, "token_rank": token_rank, "expander_rank": EXPANDER_RANK,
        "windows_per_step": WINDOWS, "max_steps": args.steps, "seq_len": 160, "learning_rate": 0.005,
        "evaluation_sequences": args.sequences, "block_rows": 48, "seed": seed,
    }  # fmt: skip
    if circuit != "ff":
        values |= {"components": COMPONENTS, "component_rank": COMPONENT_RANK}
    return parse(values, PROG)


def products(target: MtpTarget, window: int, options: TrainOptions | None) -> int:
    """Return the multiplications of one draft of n - 1 tokens; None: native recursion."""
    size, vocab, config = target.hidden_size, target.vocab_size, target.config
    width = (2 * config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    layer, row = size * (2 * size + width + 3 * WIDTH), vocab * size
    if options is None:
        return (window - 1) * (layer + row)
    r = options.num_components
    each = 2 * EXPANDER_RANK * size + row + (r * COMPONENT_RANK * (size + vocab) if r > 1 else 0)
    return layer + (window - 1) * (each + (options.token_rank or 0) * vocab + r * r * (r > 1))


def compare(
    args: argparse.Namespace, target: MtpTarget, samples: dict[str, Any], window: int, seed: int
) -> list[dict[str, Any]]:
    """Return one row for native recursion and one for each head, on held-out texts by temperature."""
    first = options_of(args, window, "ff", 0, seed)
    rows, *_ = read_data(first, target, print)
    job = first.trainer(first, target, Accelerator(cpu=True))
    with torch.no_grad():
        steps = list(islice(states_of(job, rows), max(1, args.steps // PASSES)))
    found = []

    def add(name: str, job: Any, texts: dict[str, Any], options: TrainOptions | None, token_rank: int) -> None:
        own = {"window": window, "seed": seed, "head": name, "token_rank": token_rank}
        own |= {temperature: measured(job, target, some, temperature) for temperature, some in texts.items()}
        found.append(own | {"products": products(target, window, options)})
        print(shown(found[-1]), flush=True)

    chains = {}
    for name, some in samples.items():
        tokens = some.tokens.clamp(min=0)
        documents = torch.zeros_like(tokens)
        with torch.no_grad():
            parts = target.mtp.passes(target, tokens, documents, target.hidden(tokens, documents), window - 1)
        chains[name] = replace(some, draft=torch.stack(parts, 2)[:, :-1].cpu())
    add("native recursion", job, chains, None, 0)  # the untrained head of ff is the drafter's own distribution
    texts = {name: with_drafter(some, target) for name, some in samples.items()}
    for circuit in ("ff", "cp", "hmm", "btree"):
        for token_rank in (0, TOKEN_RANK):
            options = options_of(args, window, circuit, token_rank, seed)
            job = options.trainer(options, target)
            learn(job.head, steps, options)
            add(circuit, job, texts, options, token_rank)
    return found


def table(result: dict[str, Any]) -> str:
    """Return the rows as Markdown, and what follows from them at T=1."""
    lines = ["| n | head | `token_rank` | tokens/step T=1 | T=0 | products |", "|---" * 6 + "|"]
    lines += [f"| {' | '.join(shown(row))} |" for row in result["rows"]]
    findings = []
    for window in sorted({row["window"] for row in result["rows"]}):
        rows = [row for row in result["rows"] if (row["window"], row["seed"]) == (window, result["rows"][0]["seed"])]
        native, markov = rows[0], next(row for row in rows if row["head"] == "ff" and row["token_rank"])
        circuits = [row for row in rows if row["head"] in ("cp", "hmm", "btree")]
        best = max(circuits, key=lambda row: row["t1"]["tokens_per_step"])
        for name, other in (("native recursion", native), ("ff with `token_rank` (Markov head)", markov)):
            subject = f"n={window}: {best['head']} with `token_rank` {best['token_rank']} against {name}"
            share = best["products"] / other["products"]
            findings.append(f"* {subject}: {verdict(best, other)}; {share:.0%} of its products.")
    return "\n".join([*lines, "", *findings, ""])


def verdict(one: dict[str, Any], other: dict[str, Any]) -> str:
    """Compare two rows at T=1 by their standard errors, as if the texts were not the same."""
    a, b = one["t1"], other["t1"]
    difference, noise = (
        a["tokens_per_step"] - b["tokens_per_step"],
        math.hypot(a["standard_error"], b["standard_error"]),
    )
    word = "within noise" if abs(difference) < 2 * noise else "more" if difference > 0 else "fewer"
    return f"{difference / b['tokens_per_step']:+.1%} tokens/step ({difference / noise:+.1f} standard errors: {word})"


def shown(row: dict[str, Any]) -> list[str]:
    numbers = [f"{row[name]['tokens_per_step']:.3f} ± {row[name]['standard_error']:.3f}" for name in ("t1", "t0")]
    return [str(row["window"]), row["head"], str(row["token_rank"]), *numbers, f"{row['products'] / 1e6:.2f}M"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, nargs="+", metavar="DATA", help="as for train")
    parser.add_argument("--windows", type=int, nargs="+", default=[4, 8], metavar="N")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], metavar="SEED")
    parser.add_argument("--layer-steps", type=int, default=1500, metavar="N", help="of the MTP layer")
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="of a head")
    parser.add_argument("--sequences", type=int, default=64, metavar="S", help="held-out texts per temperature")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(arguments)
    return guard(PROG, lambda: run(args))


def run(args: argparse.Namespace) -> int:
    check_file(args.json)
    started, plain = time.monotonic(), load_target(demo.path("target"))
    target = MtpTarget(**{field.name: getattr(plain, field.name) for field in fields(plain)})
    options = options_of(args, max(args.windows), "ff", 0, 0)
    rows, _, held_out = read_data(options, target, print)
    torch.manual_seed(0)
    train_layer(target, rows, args.layer_steps)
    prompts = held_out_prompts(options, target, held_out)
    samples = dict(options.trainer(options, target, Accelerator(cpu=True)).continuations(prompts).items())
    every = [(window, seed) for seed in args.seeds for window in args.windows]
    results = [row for window, seed in every for row in compare(args, target, samples, window, seed)]
    columns = ["n", "head", "token_rank", "T=1", "T=0", "products"]
    print_table("tokens/step on a native MTP layer", columns, [shown(row) for row in results])
    if args.json:
        minutes, definitions = round((time.monotonic() - started) / 60, 1), DEFINITIONS.splitlines()
        values = {"kind": "hosted heads", "definitions": definitions, **provenance.collect(), "minutes": minutes}
        write_json(args.json, values | {"rows": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
