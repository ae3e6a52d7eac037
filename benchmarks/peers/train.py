"""Train EAGLE-3, DFlash or DSpark: ``python -m benchmarks.peers.train NAME --text FOLDER --minutes M --out FOLDER``.

EAGLE-3 drafts token by token with one decoder layer, which reads three hidden states of the target and is unrolled over
three drafts in training (arXiv:2503.01840, section 3). DFlash drafts a block in one forward pass: mask tokens after an
anchor attend to the target's hidden states. DSpark adds a bias by the previous token, and a confidence head.

Models, losses, optimiser, packing, vocabulary mapping and checkpoint are those of speculators 0.9.0. Its trainer needs
an accelerator, so this module has a loop with the same clipping and linear schedule, over the minutes of the optimiser
steps, which are CPU time: other work on the cores does not count. The target reads each text of `benchmarks.own_text`
once, and its states are kept in that folder. A run that was interrupted goes on. The README has the recipes.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm_mtpc.cli import guard
from vllm_mtpc.errors import UsageError
from vllm_mtpc.report import Bar

PROG, TARGET = "python -m benchmarks.peers.train", "models/smollm2-135m-instruct"
TEXT_FILE, STATES_FILE, DONE_FILE = "own.jsonl", "peer_states", "peer_states_done"
STATE_FILE, METRICS_FILE, RUN_FILE = "state.pt", "metrics.jsonl", "run.json"
SEED, SAVE_SECONDS, LOG_STEPS = 42, 600, 10
WARMUP, MAX_NORM = 0.01, 1.0  # share of the run with a rising rate, and the largest norm of the gradient
OVERFIT_TOKENS, OVERFIT_ACCURACY = 256, 0.95

SHARED = {  # options of `speculators train` that differ from its defaults
    "optimizer": "adamw", "lr": 1e-3, "total_seq_len": 512, "max_anchors": 192, "draft_vocab_size": 16384,
    "hidden_states_dtype": "float32", "draft_attn_impl": "sdpa", "loss_implementation": "eager",
}  # fmt: skip
RECIPES: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "dflash": {"num_layers": 3, "block_size": 8},
    "dspark": {"num_layers": 3, "block_size": 8, "markov_rank": 128, "loss_fn": '{"ce": 0.1, "tv": 0.9}'},
}
FIRST = {"eagle3": "full_acc_0", "dflash": "position_1_acc", "dspark": "position_0_acc"}  # accuracy of first drafts


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__.splitlines()[0])
    parser.add_argument("algorithm", choices=RECIPES)
    parser.add_argument("--text", type=Path, required=True, metavar="FOLDER", help="of benchmarks.own_text")
    parser.add_argument("--minutes", type=float, required=True, metavar="M", help="of optimiser steps")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="continued if it is there")
    parser.add_argument("--target", default=TARGET, metavar="FOLDER")
    parser.add_argument("--vocab", type=int, default=SHARED["draft_vocab_size"], metavar="N", help="ids of the drafts")
    parser.add_argument("--lr", type=float, default=SHARED["lr"], help="largest learning rate")
    parser.add_argument("--overfit", action="store_true", help="train on one batch, at a constant rate")
    args = parser.parse_args(words)
    if find_spec("speculators") is None:
        parser.error("speculators is not installed; type benchmarks/peers/setup.sh, and run this by its Python")
    return guard(PROG, lambda: Run(args).overfit() if args.overfit else Run(args).train())


class Texts:
    """Text of a folder of `benchmarks.own_text`, with the states of a target."""

    def __init__(self, folder: Path, target: str) -> None:
        lines = [json.loads(line) for line in (folder / TEXT_FILE).read_text(encoding="utf-8").splitlines()]
        self.prompts = [len(line["prompt_ids"]) for line in lines]
        self.ids = [torch.tensor(line["prompt_ids"] + line["response_ids"]) for line in lines]
        self.lengths = [len(ids) for ids in self.ids]
        self.starts = np.cumsum([0, *self.lengths])
        self.counts = Counter(token for line in lines for token in line["response_ids"])
        self.seen = self.counts.keys() | {token for line in lines for token in line["prompt_ids"]}
        self.folder, self.target, self.model, self.seconds = folder, target, None, 0.0

    def read_layers(self, layers: list[int], hidden_size: int) -> None:
        """Open the states that enter these layers and the final norm, [tokens, layers + 1, D]; remove others."""
        self.layers, shape = layers, (int(self.starts[-1]), len(layers) + 1, hidden_size)
        sizes = {STATES_FILE: (np.float16, shape), DONE_FILE: (np.uint8, (len(self.ids),))}
        files = {self.folder / f"{name}.{'-'.join(map(str, layers))}": size for name, size in sizes.items()}
        is_kept = all(
            file.exists() and file.stat().st_size == np.prod(shape) * np.dtype(kind).itemsize
            for file, (kind, shape) in files.items()
        )
        mode = "r+" if is_kept else "w+"  # flags of other states would mark zeros as states
        self.states, self.done = (np.memmap(file, kind, mode, shape=shape) for file, (kind, shape) in files.items())

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return a conversation as a sample of speculators' data sets."""
        rows, ids = slice(self.starts[index], self.starts[index + 1]), self.ids[index]
        if not self.done[index]:
            started = time.monotonic()
            self.states[rows], self.done[index] = self._run_target(ids), 1
            self.seconds += time.monotonic() - started
        states, positions = torch.from_numpy(self.states[rows].astype(np.float32)), torch.arange(len(ids))
        sample = {"hidden_states": states[:, :-1].flatten(1), "verifier_last_hidden_states": states[:, -1]}
        sample |= {"input_ids": ids, "loss_mask": positions >= self.prompts[index], "position_ids": positions}
        return sample | {"lengths": torch.tensor([len(ids)])}

    @torch.no_grad()
    def _run_target(self, ids: Tensor) -> Tensor:
        if self.model is None:
            from transformers import AutoModel

            self.model, self._found = AutoModel.from_pretrained(self.target, dtype=torch.float32).eval(), list[Tensor]()
            for module in [*(self.model.layers[layer] for layer in self.layers), self.model.norm]:
                module.register_forward_pre_hook(lambda _, given: self._found.append(given[0][0]))
        self._found.clear()
        self.model(ids[None], use_cache=False)
        if not (states := torch.stack(self._found, 1).half()).isfinite().all():
            raise UsageError(f"target {self.target} has states beyond float16; name another one")
        return states


class Run:
    """Model, optimiser and state of one run."""

    def __init__(self, args: argparse.Namespace) -> None:
        from speculators.model import SpeculatorModel
        from speculators.train.cli import build_draft_model
        from speculators.train.config import TrainConfig
        from speculators.train.optimizers import build_optimizers
        from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution
        from transformers import AutoConfig, AutoTokenizer

        torch.manual_seed(SEED)
        self.algorithm, self.out, self.limit = args.algorithm, args.out, 60 * args.minutes
        self.texts, ids = Texts(args.text, args.target), AutoConfig.from_pretrained(args.target).vocab_size
        special = set(AutoTokenizer.from_pretrained(args.target).all_special_ids)
        mask = min(special - self.texts.seen, default=None)  # DFlash's mask token is one that no text has
        vocab, counts = min(args.vocab, ids), self.texts.counts
        d2t, t2d = build_vocab_mappings_from_distribution(counts, vocab, ids) if vocab < ids else (None, None)
        covered = sum(number for token, number in counts.items() if t2d is None or t2d[token]) / counts.total()
        given = {"speculator_type": self.algorithm, "verifier_name_or_path": args.target, "mask_token_id": mask}
        given |= SHARED | RECIPES[self.algorithm] | {"lr": args.lr, "draft_vocab_size": vocab}
        self.config = argparse.Namespace(**TrainConfig.from_flat(given).flatten())
        kind = SpeculatorModel.registry[self.algorithm]
        self.model = build_draft_model(self.config, kind, t2d, d2t, vocab).float().train()
        self.options = kind.get_trainer_kwargs(**vars(self.config))[0]
        self.optimizers = build_optimizers(self.model, self.config)
        self.texts.read_layers(self.model.target_layer_ids, self.model.hidden_size)
        self.learnt = {name: value for name, value in self.model.named_parameters() if value.requires_grad}
        self.step, self.seconds, self.tokens = 0, 0.0, 0
        parameters = sum(value.numel() for value in self.learnt.values())
        self.facts = {"given": given, "layers": self.texts.layers, "parameters": parameters, "covered": covered}
        print(json.dumps(self.facts), flush=True)

    def batch(self, indices: list[int]) -> dict[str, Any]:
        """Return packed conversations; a longer one ends at the length of a row."""
        from speculators.models.eagle3.data import shift_batch
        from speculators.train.data import CollateFn

        length = min(sum(self.texts.lengths[index] for index in indices), self.config.total_seq_len)
        # EAGLE-3 drops every first token. The last block of a row has no anchors, so DFlash has a block of padding.
        is_eagle, size = self.algorithm == "eagle3", (self.model.hidden_size, len(self.texts.layers), torch.float32)
        length += -len(indices) if is_eagle else self.config.block_size
        batch = CollateFn(length, *size, shift_batch if is_eagle else None)([self.texts[index] for index in indices])
        return {name: value for name, value in batch.items() if isinstance(value, Tensor)}

    def packs(self) -> Iterator[list[int]]:
        """Yield the conversations of each row, in a random order in every epoch."""
        for epoch in count():
            pack, room = list[int](), self.config.total_seq_len
            for index in np.random.default_rng((SEED, epoch)).permutation(len(self.texts.lengths)).tolist():
                if pack and self.texts.lengths[index] > room:
                    yield pack
                    pack, room = [], self.config.total_seq_len
                pack.append(index)
                room -= self.texts.lengths[index]
            yield pack

    def train_step(self, batch: dict[str, Any], rate: float) -> dict[str, float]:
        """Take one optimiser step; return the metrics of speculators."""
        from speculators.train.utils import normalize_counted_metrics

        for optimizer in self.optimizers:
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = rate
        options = self.options.copy()
        if "max_anchors" in options:  # speculators pads to this number
            options["max_anchors"] = min(options["max_anchors"], max(1, int(batch["loss_mask"].sum())))
        _, loss, metrics = self.model(**batch, **options)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        for optimizer in self.optimizers:
            optimizer.step()
        return normalize_counted_metrics({name: float(value) for name, value in metrics.items()})

    def overfit(self) -> int:
        """Train on one batch; return 0 if the accuracy of the first drafts reaches 0.95."""
        fitting = int(np.searchsorted(self.texts.starts, OVERFIT_TOKENS, "right")) - 1
        batch, started, accuracy = self.batch(list(range(max(1, fitting)))), time.monotonic(), 0.0
        while accuracy < OVERFIT_ACCURACY and (seconds := time.monotonic() - started) < self.limit:
            metrics, self.step = self.train_step(batch, self.config.lr), self.step + 1
            accuracy, spent = metrics[FIRST[self.algorithm]], f"{seconds / self.step:.1f} s/step"
            print(f"step {self.step}: loss {metrics['loss']:.3f}, first drafts {accuracy:.3f}, {spent}", flush=True)
        self.model.save_pretrained(self.out)
        return int(accuracy < OVERFIT_ACCURACY)

    def train(self) -> int:
        """Train until the minutes are over, or a signal; save the state and the checkpoint."""
        self.resume()
        saved, ends = self.seconds, list[int]()
        signal.signal(signal.SIGTERM, lambda number, _: ends.append(number))
        packs = islice(self.packs(), self.step, None)
        with Bar(total=round(self.limit), initial=round(self.seconds), desc=self.algorithm, unit="s") as bar:
            while self.seconds < self.limit and not ends:
                batch, share = self.batch(next(packs)), self.seconds / self.limit
                started = time.process_time()
                metrics = self.train_step(batch, self.config.lr * min(1.0, (share + 1e-4) / WARMUP) * (1.0 - share))
                self.seconds += time.process_time() - started
                self.step, self.tokens = self.step + 1, self.tokens + batch["input_ids"].numel()
                first = metrics[FIRST[self.algorithm]]
                bar.set_postfix(step=self.step, loss=metrics["loss"], first=first, refresh=False)
                bar.update(round(self.seconds) - bar.n)
                if self.step % LOG_STEPS == 0:
                    with open(self.out / METRICS_FILE, "a", encoding="utf-8") as file:
                        file.write(json.dumps({"step": self.step, "seconds": self.seconds, **metrics}) + "\n")
                if self.seconds - saved > SAVE_SECONDS:
                    saved = self.seconds
                    self.save()
        self.save()
        return int(bool(ends))

    def resume(self) -> None:
        """Load the state of an earlier start, if there is one."""
        self.out.mkdir(parents=True, exist_ok=True)
        if (file := self.out / STATE_FILE).exists():
            state = torch.load(file, weights_only=True)
            self.model.load_state_dict(state["learnt"], strict=False)
            for optimizer, values in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(values)
            self.step, self.seconds, self.tokens = state["step"], state["seconds"], state["tokens"]

    def save(self) -> None:
        """Write speculators' checkpoint, the state of the run and its facts."""
        self.model.save_pretrained(self.out)
        spent = {"step": self.step, "seconds": self.seconds, "tokens": self.tokens}
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        torch.save({"learnt": self.learnt, "optimizers": optimizers, **spent}, self.out / f"{STATE_FILE}.new")
        (self.out / f"{STATE_FILE}.new").replace(self.out / STATE_FILE)
        facts = self.facts | spent | {"target_seconds": self.texts.seconds}
        (self.out / RUN_FILE).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
