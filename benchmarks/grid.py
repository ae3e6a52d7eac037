"""Heads trained side by side on the same windows: ``python -m benchmarks.grid FILE --runs FOLDER [--json FILE]``.

FILE is YAML: ``title``, ``common`` (options of ``vllm-mtpc train``) and ``cells`` (name: what differs). ``--text`` are
folders of ``python -m benchmarks.own_text``: the target's own answers with its states. The answers of the last
``held_out`` conversations are measured, the others trained on; ``--unseen`` is measured as well (Spec-Bench). Every
step has one set of windows and one set of the target's distributions, which all cells are trained on, so that
differences between cells are paired. FOLDER has a state of all cells, which an interrupted run continues with, and in
the end their heads.

Where a trunk reads more than the last states (lora, backbone), the target runs over rows, prompts included, and
`ROW_STEPS` steps of windows are drawn from each block of rows. ``apart`` of a cell: its components start so many times
further apart.

A cell is measured along texts that the target wrote at T=1, and along its greedy texts: tokens/step, and its difference
to the cell that ``against`` names, with the standard error over texts. ``given``: P(draft k is accepted, given that the
drafts before it were), k = 1, 2, ...
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.own_text import NORMS_FILE, STATES_FILE, TEXT_FILE
from vllm_mtpc.cli import guard
from vllm_mtpc.data.rows import Rows
from vllm_mtpc.engine import provenance
from vllm_mtpc.eval.circuit_evaluator import Contexts, collect, summarise
from vllm_mtpc.eval.evaluator import ratio, step_starts
from vllm_mtpc.eval.text import Samples, Sampling
from vllm_mtpc.files import read_json, read_yaml
from vllm_mtpc.heads.head import Head
from vllm_mtpc.hf import Target
from vllm_mtpc.report import Bar, check_file, print_table, write_json
from vllm_mtpc.train.cache import Computed, data_fingerprint
from vllm_mtpc.train.losses import CircuitModule, step_loss
from vllm_mtpc.train.memory import keep_freed_memory
from vllm_mtpc.train.options import TrainOptions, parse
from vllm_mtpc.train.run import read_target, with_defaults
from vllm_mtpc.train.trainer import BETAS, MAX_NORM, Trainer, learning_rate, peak_memory_bytes
from vllm_mtpc.train.windows import Windows, WindowSource, window_states

PROG = "python -m benchmarks.grid"
TASKS = ("translation", "summarization", "qa", "math_reasoning", "rag")
SAVE_STEPS = 100
ROW_STEPS = 4  # of windows from a block of rows that the target runs over


@dataclass
class Cell:
    """A head in training."""

    name: str
    trainer: Trainer
    optimizer: torch.optim.Optimizer
    layers: list[int]  # of the target that the trunk reads besides the last states; of lora, the one it starts at
    seconds: float = 0.0  # of processors, in its steps

    @property
    def options(self) -> TrainOptions:
        return self.trainer.options

    @property
    def model(self) -> CircuitModule:
        return self.trainer.model

    @property
    def head(self) -> Head:
        return self.model.head

    def rows(self, hidden: Tensor, document: Tensor | None, layers: Sequence[int], size: int) -> Tensor:
        """Return what the trunk reads of rows [R, S, m D + D + 1] with the states of `layers`."""
        parts = dict(zip([*layers, None], hidden[..., :-1].split(size, -1), strict=True))
        if self.model.layers is not None:
            return self.model.layers.draft(parts[self.layers[0]], document)
        return torch.cat([parts[layer] for layer in (*self.layers, None)], -1) if self.layers else parts[None]


class Text(NamedTuple):
    """An answer of the target."""

    tokens: Tensor  # [T] int64: prompt and answer
    prompt: int  # tokens of the prompt
    states: Tensor  # [T - prompt, D + 1], the states that predict the answer, and the log-sums of their logits
    temperature: float
    conversation: tuple[str, int]
    task: str = ""  # of Spec-Bench


@dataclass
class Recorded:
    """The states of recorded texts in packed rows, as `train.windows.WindowSource` reads them."""

    rows: Rows
    states: Tensor  # [N, S, D + 1]
    target: Target
    layers: Sequence[int] = ()  # whose states the target computes, before the recorded ones

    @classmethod
    def of(cls, texts: list[Text], seq_len: int, target: Target) -> Recorded:
        """Pack texts in their order."""
        shape = -(-sum(len(text.tokens) for text in texts) // seq_len) + len(texts), seq_len
        tokens, document = torch.zeros(shape, dtype=torch.int32), torch.full(shape, -1, dtype=torch.int32)
        trained, states = torch.zeros(shape, dtype=torch.bool), torch.zeros(*shape, texts[0].states.shape[1])
        row, end = 0, 0
        for number, text in enumerate(texts):
            length = len(text.tokens)
            row, end = (row, end) if end + length <= seq_len else (row + 1, 0)
            at, end, answer = slice(end, end + length), end + length, end + text.prompt
            tokens[row, at], document[row, at], trained[row, answer:end] = text.tokens.int(), number, True
            states[row, answer - 1 : end - 1] = text.states
        kept = slice(0, row + 1)
        return cls(Rows(tokens[kept], document[kept], trained[kept]), states[kept], target)

    def hidden(self, row_indices: Tensor) -> Tensor:
        """Return the states of rows, [B, S, m D + D + 1]."""
        is_all = len(row_indices) == len(self.states)  # in their order, as blocks are sorted: no copy of gigabytes
        states = self.states if is_all else self.states[row_indices]
        if not self.layers:
            return states
        read = Computed(self.target, self.rows, layers=self.layers).hidden(row_indices)
        return torch.cat([read[..., : -self.target.hidden_size], states], -1)


def read_texts(folder: Path, hidden_size: int) -> list[Text]:
    """Return the texts of a folder of `benchmarks.own_text`."""
    states = np.memmap(folder / STATES_FILE, np.float16, "r").reshape(-1, hidden_size)
    norms, texts, first = np.fromfile(folder / NORMS_FILE, np.float32), list[Text](), 0
    for line in (folder / TEXT_FILE).read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        place = slice(first, first := first + len(record["response_ids"]))
        both = np.concatenate([states[place].astype(np.float32), norms[place, None]], 1)
        tokens, prompt = torch.tensor([*record["prompt_ids"], *record["response_ids"]]), len(record["prompt_ids"])
        place_of = str(folder), record["conversation"]
        task = record.get("task", "")
        task = task if task in TASKS else task and "conversation"  # MT-Bench's eight kinds
        texts.append(Text(tokens, prompt, torch.from_numpy(both), record["temperature"], place_of, task))
    return texts


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, metavar="FILE", help="YAML: title, common, measured, cells")
    parser.add_argument("--text", type=Path, required=True, nargs="+", metavar="FOLDER", help="of benchmarks.own_text")
    parser.add_argument("--unseen", type=Path, metavar="FOLDER", help="of benchmarks.own_text --questions")
    parser.add_argument("--cells", nargs="+", metavar="NAME", help="only these (default: all)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the order and the starts")
    parser.add_argument("--steps", type=int, metavar="N", help="in place of the file's")
    parser.add_argument("--runs", type=Path, required=True, metavar="FOLDER", help="of the state of the cells")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the results there as well")
    args = parser.parse_args(arguments)
    return guard(PROG, lambda: run(args))


def run(args: argparse.Namespace) -> int:
    check_file(args.json)
    plan = read_yaml(args.file)
    common = plan["common"] | {"seed": args.seed, "out": args.runs / "common", "data": [str(args.text[0] / TEXT_FILE)]}
    common |= {"max_steps": args.steps} if args.steps else {}
    keep_freed_memory()
    options = with_defaults(parse(common))
    target = read_target(options, torch.device("cpu"))
    texts = [text for folder in args.text for text in read_texts(folder, target.hidden_size)]
    last = set(list(dict.fromkeys(text.conversation for text in texts))[-plan["held_out"] :])
    measured = {"own": [text for text in texts if text.conversation in last]}
    if args.unseen:
        measured["unseen"] = read_texts(args.unseen, target.hidden_size)
    seq_len = options.seq_len or 1024
    texts = [text for text in texts if text.conversation not in last and len(text.tokens) <= seq_len]
    rows = (source := Recorded.of(texts, seq_len, target)).rows
    del texts  # gigabytes
    chosen = {name: common | (plan["cells"][name] or {}) for name in args.cells or plan["cells"]}
    chosen = {name: values | {"out": args.runs / folder_of(name)} for name, values in chosen.items()}
    cells = [build(name, values, target, rows) for name, values in chosen.items()]
    source.layers = sorted({layer for cell in cells for layer in cell.layers})
    steps = train(cells, options, source, args.runs)
    results = measure(cells, plan.get("against"), measured, source)
    for cell, row in product(cells, results):
        if row["name"] == cell.name:
            cell.trainer.save({name: row.pop(f"figures_{name}") for name in ("t1", "t0")}, facts_of(cell, rows, steps))
    names = [f"{name}_t{t}" for name in measured for t in (1, 0)]
    table = [[row["name"], f"{row['parameters'] / 1e6:.2f}M", *(shown(row[name]) for name in names)] for row in results]
    print_table(plan["title"], ("head", "parameters", *names), table)
    if args.json:
        tokens, against = int(rows.trained.sum()), plan.get("against")
        facts = {"title": plan["title"], "tokens": tokens, "steps": steps, "against": against, **provenance.collect()}
        results = [row | {"seed": args.seed} for row in results]
        write_json(args.json, {**facts, "rows": kept_rows(args.json, facts["commit"], results) + results})
    return 0


def facts_of(cell: Cell, rows: Rows, steps: int) -> dict[str, Any]:
    """Return what provenance and card say about a training."""
    per_second = steps * cell.options.windows_per_step * cell.options.window / max(cell.seconds, 1e-9)
    return {
        "steps": steps, "minutes": round(cell.seconds / 60, 1), "processes": 1, "tokens_per_second": per_second,
        "tokens": int(rows.trained.sum()), "documents": int(rows.document.max()) + 1,
        "data_sha256": data_fingerprint(rows), "peak_memory_bytes": peak_memory_bytes(torch.device("cpu")),
        "states": f"vllm {version('vllm')}",
    }  # fmt: skip


def kept_rows(file: Path, commit: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of a result of this commit that these do not replace."""
    old, new = read_json(file) if file.exists() else {}, {(row["name"], row["seed"]) for row in rows}
    return [row for row in old["rows"] if (row["name"], row["seed"]) not in new] if old.get("commit") == commit else []


def folder_of(name: str) -> str:
    """Return the folder of a cell's head."""
    return re.sub(r"[^\w=.-]+", "-", name)


def build(name: str, values: dict[str, Any], target: Target, rows: Rows) -> Cell:
    """Return an untrained cell."""
    apart = values.pop("apart", 1)
    options = with_defaults(parse(values, f"cell {name}"))
    trainer = options.trainer(options, target, Accelerator(cpu=True), rows)
    if apart != 1:
        leaves = trainer.head.leaves
        with torch.no_grad():
            getattr(leaves, "component_out" if leaves.component_rank else leaves.noise_in).mul_(apart)
    entry = trainer.config.lora_layers
    layers = [target.config.num_hidden_layers - entry] if entry else list(trainer.head.trunk.aux_layers)
    trained = [value for value in trainer.model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(trained, betas=BETAS, weight_decay=0.0, fused=True)
    return Cell(name, trainer, optimizer, layers)


def train(cells: list[Cell], options: TrainOptions, source: Recorded, folder: Path) -> int:
    """Train all cells for the steps of `options`; return their number."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "cells.pt"
    windows = max(cell.options.window for cell in cells)
    order = WindowSource(source, windows, options.windows_per_step, options.block_rows or 256, options.seed)
    if source.layers:
        share = ROW_STEPS * options.windows_per_step / (options.block_rows or 256) / order.per_row.float().mean()
        order.starts &= torch.rand(order.starts.shape, generator=torch.Generator().manual_seed(options.seed)) < share
        order.per_row = order.starts.sum(1)
    steps = options.max_steps or int(order.steps_per_epoch() * (options.epochs or 1))
    first = load(cells, file)
    with Bar(total=steps, initial=first, desc="grid", unit="step") as bar, open(folder / "losses.jsonl", "a") as log:
        batches = order.batches(first)
        for step in range(first, steps):
            batch = next(batches)
            losses = train_step(cells, batch, source, step, steps)
            if (step + 1) % 10 == 0:
                log.write(json.dumps({"step": step + 1, "losses": losses}) + "\n")
                log.flush()
            if (step + 1) % SAVE_STEPS == 0 or step + 1 == steps:
                save(cells, file, step + 1)
            bar.update()
    return steps


def train_step(cells: list[Cell], batch: Windows, source: Recorded, step: int, steps: int) -> dict[str, float]:
    """Take a step of every cell on the same windows; return the losses. The target's distribution counts for each."""
    begun = time.process_time()
    longest, losses, shared = batch.tokens.shape[1], {}, dict[int, Tensor]()
    target, size = source.target, source.target.hidden_size
    order = (batch.row * batch.hidden.shape[1] + batch.start).argsort()
    batch = batch.each(lambda value: value[order])  # by row, as backbones read them
    last, norms = batch.hidden[..., -1 - size : -1], batch.hidden[..., -1:]
    skipped = min(cell.head.leaves.skip for cell in cells)
    with torch.no_grad():
        states, own = (window_states(part, batch.row, batch.start, longest)[:, skipped:] for part in (last, norms))
        for cell in cells:
            if cell.head.columns not in shared:
                ids = cell.head.vocabulary and cell.head.vocabulary.ids
                shared[cell.head.columns] = target.logits_for(ids)(states) - own  # [B, n - skipped, columns]
    common = time.process_time() - begun
    for cell in cells:
        started, n, skip = time.process_time() - common, cell.options.window, cell.head.leaves.skip
        for group in cell.optimizer.param_groups:
            group["lr"] = learning_rate(cell.options, step, steps)
        tokens, log_p = batch.tokens[:, :n], shared[cell.head.columns][:, skip - skipped : n - skipped]
        hidden = cell.rows(batch.hidden, batch.document, source.layers, size)
        read = cell.head.trunk.windows(hidden, batch.document, batch.row, batch.start, tokens[:, 0])
        values = (lambda some, read=read, cell=cell: read(some).to(cell.head.hidden_dtype)), tokens, batch.counts[:n]
        loss = step_loss(cell.head, *values, lambda some, log_p=log_p: log_p[some], cell.options)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(cell.model.parameters(), MAX_NORM)
        cell.optimizer.step()
        cell.optimizer.zero_grad()
        cell.seconds += time.process_time() - started
        losses[cell.name] = loss.item()
    return losses


def save(cells: list[Cell], file: Path, step: int) -> None:
    """Write all cells; an interruption leaves the state before."""
    parts = {c.name: (c.model.state_dict(), c.optimizer.state_dict(), c.seconds) for c in cells}
    torch.save({"step": step, "cells": parts}, file.with_suffix(".partial"))
    file.with_suffix(".partial").rename(file)


def load(cells: list[Cell], file: Path) -> int:
    """Read the cells of an interrupted run; return their step."""
    if not file.exists():
        return 0
    kept = torch.load(file, weights_only=True)
    for cell in cells:
        model, optimizer, cell.seconds = kept["cells"][cell.name]
        cell.model.load_state_dict(model)
        cell.optimizer.load_state_dict(optimizer)
    return kept["step"]


def measure(
    cells: list[Cell], against: str | None, measured: dict[str, list[Text]], source: Recorded
) -> list[dict[str, Any]]:
    """Return a row per cell: its size, seconds and results by texts and their temperature."""
    target = source.target
    chosen = {
        f"{name}_t{t}": [text for text in some if text.temperature == t]
        for name, some in measured.items()
        for t in (1, 0)
    }
    texts = {name: samples_of(some, target, source.layers) for name, some in chosen.items()}
    rows, base = [], dict[str, tuple[Tensor, Tensor]]()
    order = sorted(cells, key=lambda cell: cell.name != against)
    for cell in Bar(order, desc="measured", unit="head"):
        results = {}
        for name, samples in texts.items():
            if samples.draft is not None:
                with torch.inference_mode():
                    read = cell.rows(samples.draft, None, source.layers, target.hidden_size)
                samples = replace(samples, draft=read)
            contexts = collect(cell.head, target, samples, Sampling(float(name[-1])))
            found, alive = summarise(contexts), contexts.overlap
            starts = step_starts(contexts.text, contexts.valid)
            sums = (starts * (1 + alive.sum(-1))).sum(1), starts.sum(1)  # tokens and steps of each text
            base.setdefault(name, sums)
            ahead = [1.0, *found.per_position[:-1]]
            results |= {f"figures_{name[-2:]}": asdict(found)} if name.startswith("own") else {}
            results[name] = {
                "tokens_per_step": found.tokens_per_step, "standard_error": found.standard_error,
                "given": [k / max(before, 1e-9) for k, before in zip(found.per_position, ahead, strict=True)],
                "gain": paired(sums, base[name]), "coverage": found.coverage, "texts": found.sequences,
                **by_task([text.task for text in chosen[name]], *sums, contexts),
            }  # fmt: skip
        parameters = sum(value.numel() for value in cell.model.parameters() if value.requires_grad)
        rows.append({"name": cell.name, "parameters": parameters, "seconds": round(cell.seconds, 1), **results})
    return rows


def by_task(tasks: Sequence[str], tokens: Tensor, steps: Tensor, contexts: Contexts) -> dict[str, Any]:
    """Return tokens/step, their error and the share of ids that can be drafted by task, where texts have one."""
    found = {}
    for task in dict.fromkeys(filter(None, tasks)):
        of_task = torch.tensor([one == task for one in tasks])
        covered = contexts.covered[of_task].sum() / contexts.valid[of_task].sum()
        mean, error = ratio(tokens[of_task], steps[of_task])
        found[task] = {"tokens_per_step": mean, "standard_error": error, "coverage": covered.item()}
    return {"tasks": found} if found else {}


def paired(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> list[float]:
    """Return the difference of two ratios over the same texts and its standard error (linearised)."""
    values, residuals = [], []
    for tokens, steps in (one, other):
        values.append(ratio(tokens, steps)[0])
        residuals.append((tokens - values[-1] * steps) / steps.mean())
    spread = (residuals[0] - residuals[1]).std().item()
    return [values[0] - values[1], spread / len(residuals[0]) ** 0.5]


def samples_of(texts: list[Text], target: Target, layers: Sequence[int]) -> Samples:
    """Return texts as the evaluator reads them; with layers, `draft` has the states that `Recorded.hidden` has."""
    tokens = pad_sequence([text.tokens for text in texts], True, -1)
    hidden = pad_sequence([F.pad(text.states[:, :-1], (0, 0, text.prompt - 1, 0)) for text in texts], True)
    prompts, lengths = (torch.tensor(sizes) for sizes in zip(*((t.prompt, len(t.tokens)) for t in texts), strict=True))
    if not layers:
        return Samples(tokens, hidden, prompts, lengths)
    parts = tokens.clamp(min=0).split(target.rows_at_once)
    states = torch.cat([target.hidden_with(layers, part)[:, :-1] for part in parts])
    return Samples(tokens, hidden, prompts, lengths, draft=F.pad(states, (0, 1)))


def shown(result: dict[str, Any]) -> str:
    """Format the result of one text."""
    gain, error = result["gain"]
    return f"{result['tokens_per_step']:.3f} ± {result['standard_error']:.3f} ({gain:+.3f} ± {error:.3f})"


if __name__ == "__main__":
    sys.exit(main())
