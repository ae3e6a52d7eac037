"""Bound what dependence between drafts can bring on a target, without a trained head.

    python -m benchmarks.dependence --target NAME FOLDER ANSWERS WINDOW --work FOLDER --json FILE --figure FILE

One context of each of ANSWERS, the target's own text (`prompt_ids`, `response_ids`), ends with x_1. The target draws
x_2..x_n at temperature 1 as a tree of prefixes, and its p after each prefix is kept. `HELD_OUT` continuations are the
text along which drafts from q are accepted (`vllm_mtpc.eval.circuit_evaluator`). The q know the last j tokens alone: of
`DRAWN` continuations of the target that has read these,

    tree      p after the prefix: all dependence. n tokens/step at j = all
    1         factorised, fitted to this context: Adam on the tokens/step of the drawn continuations
    2, 4, 16  an HMM with that many states, fitted so from groups with equal first tokens; `4 cp`: one latent
    mean      the mean of p: factorised, of least KL; `markov`: of p after equal last tokens, and of `mean` once

A smaller j stands for a worse head. Few draws (`half`: half of them) make 2 to 16 and markov lower bounds. `IDS` ids
of a position have their own probability, all others one (`rest`). Nats: entropies, the total correlation (`tc`: KL of
p from the mean of the others), the KL of the full p from tree (`not read`). ±: standard error over contexts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache

from benchmarks.serve_tables import content
from vllm_mtpc.cli import guard
from vllm_mtpc.engine import provenance
from vllm_mtpc.hf import Target, load_target
from vllm_mtpc.plots.draw import panels
from vllm_mtpc.report import check_file, print_table, write_json

PROG = "python -m benchmarks.dependence"
DRAWN, HELD_OUT, IDS, STEPS = 64, 16, 512, 40
READ = {"all": 0, "64": 64, "32": 32, "16": 16, "4": 4}  # last tokens of a context, x_1 included
OF_SUBWORDS = ("smollm2-grid", "smollm2-factors", "smollm2-rows", "smollm2-circuits")  # results of trained heads
FITS = ("1", "2", "4", "16", "4 cp", "1 half", "4 half")
SETTINGS = {"drawn": DRAWN, "held_out": HELD_OUT, "ids": IDS, "steps": STEPS, "fits": FITS, "read": READ}


@torch.inference_mode()
def draw(target: Target, context: Tensor, count: int, texts: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Draw continuations of context[C] and add texts[E, m]; return all paths and p [paths, V] at each k."""
    cache, paths, probabilities = DynamicCache(), F.pad(texts, (0, 0, count, 0)), []
    node, seen = torch.zeros(len(paths), dtype=torch.long), torch.zeros(1, 0, dtype=torch.bool)
    states = target.backbone(input_ids=context[None], past_key_values=cache, use_cache=True).last_hidden_state[:, -1:]
    for k in range(paths.shape[1]):
        p = target.logits(states[0]).softmax(-1)  # [nodes, V]
        paths[:count, k] = torch.multinomial(p[node[:count]], 1)[:, 0]
        probabilities.append(p[node])
        (parent, token), node = torch.stack([node, paths[:, k]]).unique(dim=1, return_inverse=True)
        seen = torch.cat([seen[parent], torch.eye(len(token), dtype=torch.bool)], 1)  # ancestors and itself
        mask = torch.cat([torch.ones(len(token), len(context), dtype=torch.bool), seen], 1)[None, None]
        inputs = {"input_ids": token[None], "attention_mask": mask, "past_key_values": cache, "use_cache": True}
        inputs["position_ids"] = torch.full((1, len(token)), len(context) + k)
        if k + 1 < paths.shape[1]:
            states = target.backbone(**inputs).last_hidden_state
    return paths, probabilities


def compact(paths: Tensor, p: list[Tensor], q: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Keep `IDS` ids of each position; return paths[N, m] and p, q [m, N, IDS + 1], the last one: all other ids."""
    rows, kept = [], []
    for k, pair in enumerate(zip(p, q, strict=True)):
        score = pair[0].mean(0) + pair[1].mean(0)
        score[paths[:, k]] += 1
        ids = score.topk(min(IDS, len(score) - 1)).indices
        rows.append(torch.full((len(score),), len(ids)).index_put((ids,), torch.arange(len(ids)))[paths[:, k]])
        chosen = torch.stack([x[:, ids] for x in pair])
        kept.append(torch.cat([chosen, (1 - chosen.sum(-1, keepdim=True)).clamp(min=1e-9)], -1))
    return torch.stack(rows, 1), *torch.stack(kept, 1)


def accepted(p: Tensor, q: Tensor, paths: Tensor) -> Tensor:
    """Return P(drafts 1..k accepted) [m], the mean over paths[N, m]; p, q: [m, N, U] along them."""
    factor = (q / p).gather(-1, paths.T[..., None])[..., 0].clamp(max=1)  # [m, N]
    before = torch.cat([torch.ones_like(factor[:1]), factor.cumprod(0)[:-1]])
    return (before * torch.minimum(p, q).sum(-1)).mean(1)


def fit(p: Tensor, paths: Tensor, states: int, is_chain: bool) -> list[Tensor]:
    """Return leaves, root and transitions that maximise tokens/step + 0.1 log-likelihood along paths[N, m]."""
    place = torch.from_numpy(np.lexsort(paths.T.flip(0).numpy())).argsort()
    share = F.one_hot(place * states // len(place), states).T.float()  # [r, N]
    groups = share / share.sum(1, keepdim=True) @ (p + F.one_hot(paths.T, p.shape[-1])) / 2
    mean = p.mean(1, keepdim=True)
    leaf = (0.8 * groups + 0.2 * mean if states > 1 else mean).clamp(min=1e-9).log()
    free = [leaf, torch.zeros(states), *[(3 * torch.eye(states)).repeat(len(p) - 1, 1, 1)] * is_chain]
    optimizer = torch.optim.Adam([one.requires_grad_() for one in free], lr=0.15)
    for _ in range(STEPS):
        q = along(free, paths)
        loss = (0.1 * nats(p, q) - accepted(p, q, paths)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [one.detach() for one in free]


def along(free: list[Tensor], paths: Tensor) -> Tensor:
    """Return q [m, N, U] along paths[N, m]."""
    leaf, found, weights = free[0].softmax(-1), [], free[1].softmax(0).expand(len(paths), -1)
    for k in range(len(leaf)):
        found.append(weights @ leaf[k])
        weights = weights * leaf[k, :, paths[:, k]].T
        weights = weights / weights.sum(1, keepdim=True).clamp(min=1e-30)
        if len(free) > 2 and k + 1 < len(leaf):
            weights = weights @ free[2][k].softmax(-1)
    return torch.stack(found)


def markov(tree: Tensor, drawn: Tensor, texts: Tensor) -> Tensor:
    """Return q [m, E, U] along texts[E, m]: the mean of tree[m, N, U] over drawn[N, m] with the same token before."""
    mean = tree.mean(1, keepdim=True)
    same = (texts.T[:-1, :, None] == drawn.T[:-1, None, :]).float()  # [m - 1, E, N]
    later = (same @ tree[1:] + mean[1:]) / (same.sum(-1, keepdim=True) + 1)
    return torch.cat([mean[:1].expand(-1, len(texts), -1), later])


def nats(p: Tensor, q: Tensor) -> Tensor:
    """Return the cross-entropy [m] of q, the mean over paths."""
    return -(p * q.clamp(min=1e-12).log()).sum(-1).mean(1)


def measure(target: Target, context: Tensor, window: int, seed: int) -> dict[str, Any]:
    """Return for each j the acceptance [m] of each draft, and nats."""
    torch.manual_seed(seed)
    texts, full = draw(target, context, HELD_OUT, torch.zeros(0, window - 1, dtype=torch.long))
    found: dict[str, Any] = {}
    for read, tokens in READ.items():
        paths, tree = draw(target, context[-tokens:], DRAWN, texts)
        at, p, q = compact(paths, [torch.cat([x[:DRAWN], y]) for x, y in zip(tree, full, strict=True)], tree)
        drawn, own, text, p = at[:DRAWN], q[:, :DRAWN], at[DRAWN:], p[:, DRAWN:]
        mean = own.mean(1, keepdim=True)
        drafts = {"tree": q[:, DRAWN:], "mean": mean.expand_as(p), "markov": markov(own, drawn, text)}
        for name in FITS:
            states, *kind = name.split()
            count = DRAWN // 2 if "half" in kind else DRAWN
            drafts[name] = along(fit(own[:, :count], drawn[:count], int(states), "cp" not in kind), text)
        values = {"entropy": nats(own, own), "entropy of mean": nats(mean, mean), "rest": p[..., -1].mean(1)}
        values["tc"] = nats(own, (DRAWN * mean - own) / (DRAWN - 1)) - values["entropy"]
        values["not read"] = nats(p, drafts["tree"]) - nats(p, p)
        accept = {key: accepted(p, q, text) for key, q in drafts.items()}
        found[read] = {key: [round(x, 5) for x in one.tolist()] for key, one in (accept | values).items()}
    return found


def contexts(file: Path, window: int) -> list[Tensor]:
    """Return a context of each answer that is long enough."""
    found, rng = [], np.random.default_rng(0)
    for line in file.read_text(encoding="utf-8").splitlines():
        one = json.loads(line)
        if (places := len(one["response_ids"]) - window + 1) > 0:
            found.append(torch.tensor(one["prompt_ids"] + one["response_ids"][: rng.integers(places) + 1]))
    return found


def summarise(found: list[dict[str, list[float]]]) -> dict[str, Any]:
    """Return mean over contexts, standard error and positions; of drafts also the gain over factorised ones."""
    values, row = {key: np.array([one[key] for one in found]) for key in found[0]}, {}
    for key, one in values.items():
        total, base = one.sum(1), values["1 half" if "half" in key else "1"].sum(1) + 1
        row[key] = {"mean": total.mean(), "error": total.std(ddof=1) / len(one) ** 0.5, "positions": one.mean(0)}
        if key in ("tree", "mean", "markov", *FITS):
            gain = (1 + total).mean() / base.mean()
            error = (1 + total - gain * base).std(ddof=1) / base.mean() / len(base) ** 0.5
            row[key] |= {"mean": 1 + total.mean(), "gain": 100 * np.array([gain - 1, error])}
    return {key: {name: np.round(x, 4).tolist() for name, x in one.items()} for key, one in row.items()}


def draw_gains(targets: list[dict[str, Any]], file: Path) -> None:
    """Draw the gain of drafts over factorised ones against the tokens/step of these."""
    shown = {"tree": "all dependence", "16": "16 states", "4": "4 states", "markov": "token before"}
    with panels([file], len(targets), (3.6 * len(targets), 3.0)) as axes:
        for axis, target in zip(axes, targets, strict=True):
            rows = target["rows"].values()
            for (key, label), marker in zip(shown.items(), "^sDo", strict=True):
                base, gain, error = zip(*((row["1"]["mean"], *row[key]["gain"]) for row in rows), strict=True)
                axis.errorbar(base, gain, error, marker=marker, label=label)
            if found := measured(target["name"]):
                base, gain, error = zip(*found, strict=True)
                axis.errorbar(base, gain, error, fmt="kx", label="measured, HMM over ff")
            axis.set(title=target["name"], xlabel="tokens/step, factorised", ylabel="gain in tokens/step (%)")
        axes[0].legend()


def measured(name: str) -> list[tuple[float, float, float]]:
    """Return tokens/step of ff, and the gain of an HMM on the same trunk and texts in percent ± its error."""
    found = []
    for result in OF_SUBWORDS if name == "subwords" else ():
        rows = {(row["name"], row["seed"]): row for row in content(result)["rows"]}
        for (head, seed), row in rows.items():
            base = rows.get((head.replace("hmm r=4", "ff"), seed))
            for text in ("own_t1", "unseen_t1") if base is not None and "hmm r=4" in head else ():
                ff, gain = base[text]["tokens_per_step"], row[text]["tokens_per_step"] - base[text]["tokens_per_step"]
                found.append((ff, 100 * gain / ff, 100 * row[text]["gain"][1] / ff))
    return found


def run(args: argparse.Namespace) -> int:
    """Measure missing contexts and print the tables."""
    check_file(args.json)
    args.work.mkdir(parents=True, exist_ok=True)
    targets: list[dict[str, Any]] = []
    for name, folder, answers, window in args.target:
        target, found = None, []
        for seed, context in enumerate(tqdm(contexts(Path(answers), int(window))[: args.contexts], name)):
            key = hashlib.sha256(f"{context.tolist()} {window} {SETTINGS}".encode()).hexdigest()[:12]
            file = args.work / f"{name}-{seed}-{key}.json"
            if not file.exists():
                target = target or load_target(folder, torch.float32)
                write_json(file, measure(target, context, int(window), seed))
            found.append(json.loads(file.read_text(encoding="utf-8")))
        rows = {read: summarise([one[read] for one in found]) for read in READ}
        targets.append({"name": name, "window": int(window), "contexts": len(found), "rows": rows})
        lines = [[key, *(f"{row[key]['mean']} ± {row[key]['error']}" for row in rows.values())] for key in rows["all"]]
        print_table(f"{name}, n={window}, {len(found)} contexts", ["last tokens read", *READ], lines)
    write_json(args.json, {"kind": "dependence", **provenance.collect(), **SETTINGS, "targets": targets})
    draw_gains(targets, args.figure)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__.splitlines()[0])
    parser.add_argument("--target", nargs=4, action="append", metavar=("NAME", "FOLDER", "ANSWERS", "WINDOW"))
    parser.add_argument("--contexts", type=int, default=40, help="of each target (default: %(default)s)")
    parser.add_argument("--work", type=Path, required=True, metavar="FOLDER", help="finished contexts are kept there")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="the result")
    parser.add_argument("--figure", type=Path, required=True, metavar="FILE", help="an SVG or PNG file")
    raise SystemExit(guard(PROG, lambda: run(parser.parse_args())))
