"""Circuits on a native MTP layer: ``python -m benchmarks.hosted --data DATA... --json FILE``.

The demo's byte target gets one MTP layer as DeepSeek-V3's, trained here on x_2 alone and then frozen. Compared on the
same held-out texts: native recursion, which runs the layer and the lm_head once per draft, and heads of kind `hosted`,
which run the layer once. The heads learn from the same states, windows and steps; seeds are those of the heads.

products: multiplications of a step's draft for one request, attention to the text left out. Differences are paired by
text: the tokens and steps of a text are summed over the seeds.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from benchmarks.backbone import learn, states_of
from vllm_mtpc import demo
from vllm_mtpc.cli import guard
from vllm_mtpc.engine import provenance
from vllm_mtpc.engine.counters import DEFINITIONS
from vllm_mtpc.eval.acceptance import collect
from vllm_mtpc.eval.metrics import ratio, step_starts
from vllm_mtpc.eval.text import with_drafter
from vllm_mtpc.heads.backbone import Layer
from vllm_mtpc.heads.hosted import DRAFTER
from vllm_mtpc.hf import Target, bind, load_target
from vllm_mtpc.hf.attention import document_positions
from vllm_mtpc.progress import Bar
from vllm_mtpc.report import check_file, print_table, write_json
from vllm_mtpc.train.options import TrainOptions, parse
from vllm_mtpc.train.run import read_data
from vllm_mtpc.train.trainer import held_out_prompts

PROG = "python -m benchmarks.hosted"
EXPANDER_RANK, TOKEN_RANK = 64, 32
WIDTH, ROWS, RATE = 512, 16, 3e-3  # of the MTP layer: its MLP, the rows of a step, the peak learning rate
WINDOWS, PASSES = 256, 2  # of a step of a head, and over the windows


class Spec(NamedTuple):
    """A compared head; sizes of ff are those of one component."""

    head: str
    circuit: str
    token_rank: int = TOKEN_RANK
    components: int = 8
    component_rank: int = 32


NATIVE, MARKOV = "native recursion", Spec("hosted", "ff", components=1, component_rank=0)
SPECS = (
    *(MARKOV._replace(token_rank=0), MARKOV, Spec("hosted", "cp"), Spec("hosted", "hmm", token_rank=0)),
    *(Spec("hosted", "hmm"), Spec("hosted", "hmm", component_rank=16), Spec("hosted", "hmm", components=16)),
    *(Spec("hosted", "btree"), Spec("product", "hmm", 0, 8, 8), Spec("product", "hmm", TOKEN_RANK, 8, 8)),
)


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


def options_of(args: argparse.Namespace, window: int, spec: Spec, seed: int) -> TrainOptions:
    values = {
        "target": str(demo.path("target")), "data": args.data, "out": "none", "head": spec.head, "drafter": "mtp",
        "circuit": spec.circuit, "window": window, "token_rank": spec.token_rank, "expander_rank": EXPANDER_RANK,
        "windows_per_step": WINDOWS, "max_steps": args.steps, "seq_len": 160, "learning_rate": 0.005,
        "evaluation_sequences": args.sequences, "block_rows": 48, "seed": seed,
    }  # fmt: skip
    if spec.circuit != "ff":
        values |= {"components": spec.components, "component_rank": spec.component_rank}
    return parse(values, PROG)


def products(target: MtpTarget, window: int, spec: Spec | None) -> int:
    """Return the multiplications of one draft of n - 1 tokens; None: native recursion."""
    size, vocab, config = target.hidden_size, target.vocab_size, target.config
    width = (2 * config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    layer, row = size * (2 * size + width + 3 * WIDTH), vocab * size
    if spec is None:
        return (window - 1) * (layer + row)
    r = spec.components
    components = r * spec.component_rank * (vocab + size * (spec.head == "hosted"))
    return layer + (window - 1) * (2 * EXPANDER_RANK * size + row + components + spec.token_rank * vocab + r * r)


def measured(job: Any, target: MtpTarget, samples: Any, name: str) -> dict[str, Any]:
    """Return expected tokens/step on texts of one temperature, and the expected tokens and steps of each text."""
    bind(job.head, target)
    contexts = collect(job.head, target, samples, job.samplings()[name])
    starts = step_starts(contexts.text, contexts.valid)
    pairs = torch.stack([(starts * (1 + contexts.overlap.sum(-1))).sum(1), starts.sum(1)], 1)
    value, error = ratio(*pairs.T)
    return {
        "tokens_per_step": value,
        "standard_error": error,
        "texts": [[round(x, 3) for x in p] for p in pairs.tolist()],
    }


def compare(args: argparse.Namespace, target: MtpTarget, window: int, texts: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one row for native recursion, and one for each head and seed, on held-out texts by temperature."""
    found: list[dict[str, Any]] = []
    with_states = {name: with_drafter(some, target) for name, some in texts.items()}

    def add(job: Any, texts: dict[str, Any], spec: Spec | None, seed: int | None) -> None:
        own = {"window": window, "seed": seed} | (spec._asdict() if spec else {"head": NATIVE})
        own |= {temperature: measured(job, target, some, temperature) for temperature, some in texts.items()}
        found.append(own | {"products": products(target, window, spec)})
        print(shown(found[-1:]), flush=True)

    for seed in args.seeds:
        first = options_of(args, window, MARKOV._replace(token_rank=0), seed)
        rows, *_ = read_data(first, target, lambda *_: None)
        job = first.trainer(first, target, Accelerator(cpu=True))
        with torch.no_grad():
            steps = list(islice(states_of(job, rows), max(1, args.steps // PASSES)))
        if seed == args.seeds[0]:  # the untrained head of ff is the drafter's own distribution
            add(job, {name: recursion(target, some, window) for name, some in texts.items()}, None, None)
        for spec in SPECS:
            options = options_of(args, window, spec, seed)
            job = options.trainer(options, target)
            learn(job.head, steps, options)
            add(job, with_states, spec, seed)
    return found


@torch.no_grad()
def recursion(target: MtpTarget, samples: Any, window: int) -> Any:
    """Return the texts with the states of n - 1 passes of the layer."""
    tokens = samples.tokens.clamp(min=0)
    documents = torch.zeros_like(tokens)
    parts = target.mtp.passes(target, tokens, documents, target.hidden(tokens, documents), window - 1)
    return replace(samples, draft=torch.stack(parts, 2)[:, :-1].cpu())


Rows = list[dict[str, Any]]  # of one head and window, a row per seed


def groups(result: dict[str, Any]) -> list[Rows]:
    """Return the rows of each head, native recursion first."""
    keys = ("window", *Spec._fields)
    found: dict[tuple[Any, ...], Rows] = {}
    for row in result["rows"]:
        found.setdefault(tuple(row.get(key) for key in keys), []).append(row)
    return list(found.values())


def influence(rows: Rows, name: str) -> tuple[float, Tensor]:
    """Return tokens/step over all seeds, and each text's share of its error."""
    tokens, steps = torch.tensor([row[name]["texts"] for row in rows], dtype=torch.float64).sum(0).T
    value = (tokens.sum() / steps.sum()).item()
    return value, (tokens - value * steps) / steps.sum()


def error_of(shares: Tensor) -> float:
    """Return the standard error of a sum of the texts' shares."""
    return shares.std().item() * math.sqrt(len(shares))


def table(result: dict[str, Any]) -> str:
    """Return the rows as Markdown, and what follows from them at T=1."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    lines += [f"| {' | '.join(shown(rows))} |" for rows in groups(result)]
    return "\n".join([*lines, "", *findings(result), ""])


def findings(result: dict[str, Any]) -> list[str]:
    """Compare the best circuits with native recursion and the Markov head."""
    found = []
    for window in sorted({row["window"] for row in result["rows"]}):
        native, *heads = [rows for rows in groups(result) if rows[0]["window"] == window]
        by_spec = {Spec(*(rows[0][key] for key in Spec._fields)): rows for rows in heads}
        markov = by_spec.pop(MARKOV)
        circuits = [(spec, rows) for spec, rows in by_spec.items() if spec.circuit != "ff"]
        cheap = [one for one in circuits if one[1][0]["products"] <= native[0]["products"] / 2]
        for prefix, some in (("best", circuits), ("best with half of native recursion's products", cheap)):
            spec, best = max(some, key=lambda one: influence(one[1], "t1")[0])
            for name, other in ((NATIVE, native), ("the Markov head", markov)):
                share = best[0]["products"] / other[0]["products"]
                subject = f"n={window}, {prefix}: {described(spec)} against {name}"
                found.append(f"* {subject}: {verdict(best, other)}; {share:.0%} of its products.")
        for spec, rows in ((spec, rows) for spec, rows in by_spec.items() if spec.head == "product"):
            factors = markov if spec.token_rank else by_spec[MARKOV._replace(token_rank=0)]
            share = rows[0]["products"] / factors[0]["products"]
            subject = f"n={window}, {described(spec)} against its factors alone"
            found.append(f"* {subject}: {verdict(rows, factors)}; {share:.0%} of their products.")
    return found


def described(spec: Spec) -> str:
    sizes = f"r={spec.components}, `component_rank` {spec.component_rank}, `token_rank` {spec.token_rank}"
    return f"{spec.head} {spec.circuit} ({sizes})"


def verdict(one: Rows, other: Rows) -> str:
    """Compare two heads at T=1 by the differences of their texts."""
    (a, left), (b, right) = influence(one, "t1"), influence(other, "t1")
    noise = error_of(left - right)
    word = "within noise" if abs(a - b) < 2 * noise else "more" if a > b else "fewer"
    return f"{a / b - 1:+.1%} ± {noise / b:.1%} tokens/step ({word})"


COLUMNS = (
    "n",
    "head",
    "circuit",
    "r",
    "`component_rank`",
    "`token_rank`",
    "tokens/step T=1",
    "seeds",
    "T=0",
    "products",
)


def shown(rows: Rows) -> list[str]:
    """Return a line of the table: means over seeds with the error of the texts, and the range of the seeds at T=1."""
    first, numbers = rows[0], []
    for name in ("t1", "t0"):
        value, shares = influence(rows, name)
        numbers.append(f"{value:.3f} ± {error_of(shares):.3f}")
    seeds = sorted(row["t1"]["tokens_per_step"] for row in rows)
    spread = f"{seeds[0]:.3f} to {seeds[-1]:.3f}" if len(seeds) > 1 else ""
    sizes = [str(first.get(key, "")) for key in ("circuit", "components", "component_rank", "token_rank")]
    return [
        str(first["window"]),
        first["head"],
        *sizes,
        numbers[0],
        spread,
        numbers[1],
        f"{first['products'] / 1e6:.2f}M",
    ]


def draw(result: dict[str, Any], file: Path) -> None:
    """Draw tokens/step at T=1 over the products of a draft."""
    from matplotlib import pyplot as plt

    plt.rcParams["svg.hashsalt"] = "vllm_mtpc"
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for rows in groups(result):
        value, shares = influence(rows, "t1")
        first, x = rows[0], rows[0]["products"] / 1e6
        color = {"hosted": "C0", "product": "C1"}.get(first["head"], "C2")
        axes.errorbar(x, value, error_of(shares), fmt="o", color=color, ecolor="0.8")
        sizes = f" r={first['components']} c={first['component_rank']}" if first.get("components", 1) > 1 else ""
        name = f"{first['head']} {first['circuit']}{sizes} t={first['token_rank']}" if "circuit" in first else NATIVE
        axes.annotate(name, (x, value), xytext=(5, 4), textcoords="offset points", fontsize=7)
    axes.margins(x=0.3)
    axes.set(xlabel="million products of a draft", ylabel="tokens/step, T=1", title="Heads on a native MTP layer, n=8")
    figure.savefig(file, metadata={"Date": None, "Creator": None} if file.suffix == ".svg" else None)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, nargs="+", metavar="DATA", help="as for train")
    parser.add_argument("--windows", type=int, nargs="+", default=[8], metavar="N")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="SEED")
    parser.add_argument("--layer-steps", type=int, default=1500, metavar="N", help="of the MTP layer")
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="of a head")
    parser.add_argument("--sequences", type=int, default=64, metavar="S", help="held-out texts per temperature")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="tokens/step over products, .svg or .png")
    args = parser.parse_args(arguments)
    return guard(PROG, lambda: run(args))


def run(args: argparse.Namespace) -> int:
    check_file(args.json)
    started, plain = time.monotonic(), load_target(demo.path("target"))
    target = MtpTarget(**{field.name: getattr(plain, field.name) for field in fields(plain)})
    options = options_of(args, max(args.windows), MARKOV, 0)
    rows, _, held_out = read_data(options, target, print)
    torch.manual_seed(0)
    train_layer(target, rows, args.layer_steps)
    prompts = held_out_prompts(options, target, held_out)
    texts = dict(options.trainer(options, target, Accelerator(cpu=True)).continuations(prompts).items())
    results = [row for window in args.windows for row in compare(args, target, window, texts)]
    print_table("tokens/step on a native MTP layer", COLUMNS, [shown(rows) for rows in groups({"rows": results})])
    if args.figure:
        draw({"rows": results}, args.figure)
    if args.json:
        minutes, definitions = round((time.monotonic() - started) / 60, 1), DEFINITIONS.splitlines()
        values = {"kind": "hosted heads", "definitions": definitions, **provenance.collect(), "minutes": minutes}
        write_json(args.json, values | {"rows": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
