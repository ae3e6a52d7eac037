"""What a run does whatever family its head is of. A family's job is a subclass, named in `vllm_mtpc.families`."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from vllm_mtpc.checkpoint.locate import verifier_name
from vllm_mtpc.eval.loading import prompts
from vllm_mtpc.eval.speed import worth
from vllm_mtpc.eval.text import Samples, Sampling, generate
from vllm_mtpc.hf import check_length
from vllm_mtpc.plots.draw import plot_acceptance, plot_loss
from vllm_mtpc.progress import Bar
from vllm_mtpc.train.card import provenance
from vllm_mtpc.train.loop import METRICS_FILE, read_metrics
from vllm_mtpc.train.options import TrainOptions
from vllm_mtpc.train.windows import WindowSource

if TYPE_CHECKING:
    from vllm_mtpc.data.rows import Rows
    from vllm_mtpc.data.sources import Documents
    from vllm_mtpc.hf import Target
    from vllm_mtpc.train.cache import HiddenSource

BLOCK_BYTES = 1 << 30
SEQUENCES, FEW = 64, 8  # held-out texts where no number is named, and those measured in any case
SEEDS = {"t1": 101, "t0": 102}


class Job(ABC):
    """A run: made from its options and the target, its random numbers from the seed."""

    own: ClassVar[tuple[str, ...]]  # options that no other family has
    noun: ClassVar[str]  # what the family is called where another one refuses its options
    chosen_by: ClassVar[str]  # what to set for this family
    hints: ClassVar[Mapping[str, str]] = {}  # what else is said where an option of another family is refused
    defaults: ClassVar[Mapping[str, Any]] = {}  # where they are not those of TrainOptions
    draw: Callable[[int, int], Tensor] | None = None  # random numbers of windows, as of WindowSource
    needs_v2 = False  # whether Model Runner V2 alone serves the head
    partial_start = ""  # which weights of the named start were copied and which were not, where not all were
    config: Any  # of the head that is written

    def __init__(self, options: TrainOptions, target: Target) -> None:
        self.options, self.target = options, target
        self.verifier = options.verifier or verifier_name(options.target, options.out)  # how the head names its target
        torch.manual_seed(options.seed)
        sizes = {"vocab_size": target.vocab_size, "hidden_size": target.hidden_size}
        self.config = self.head_config(options, target.model.config, self.verifier, sizes)

    @classmethod
    @abstractmethod
    def check(cls, options: TrainOptions) -> None:
        """Raises ValueError for options that do not go together."""

    @classmethod
    def check_target(cls, options: TrainOptions, target: Any) -> None:
        """Raises an MtpcError for options that do not go with a target of this transformers config."""
        text = target.get_text_config()
        sizes = {"vocab_size": text.vocab_size, "hidden_size": text.hidden_size}
        cls.check_start(options, cls.head_config(options, target, options.target, sizes))

    @staticmethod
    @abstractmethod
    def head_config(options: TrainOptions, target: Any, verifier: str, sizes: dict[str, Any]) -> Any:
        """The config of a head for a target of this transformers config; `sizes`: its vocab_size and hidden_size."""

    @staticmethod
    @abstractmethod
    def check_start(options: TrainOptions, config: Any) -> None:
        """Raises an MtpcError where a head of this config cannot start or be compared as the options name."""

    @staticmethod
    @abstractmethod
    def kind(options: TrainOptions) -> str:
        """What is trained, in a word."""

    @staticmethod
    def loss_unit(options: TrainOptions) -> str:
        """What the loss counts, for the axis of a plot."""
        return "nats per token"

    @staticmethod
    def greedy_share(options: TrainOptions) -> float:
        """The share of the regenerated responses at temperature 0; none where a head learns one distribution."""
        return 0.0

    @abstractmethod
    def drafter(self) -> nn.Module:
        """What a training step runs: (windows, watch) -> (loss, sums that are watched)."""

    @abstractmethod
    def source(self, rows: Rows) -> HiddenSource:
        """What windows are cut from."""

    def numbers_held(self) -> int:
        """Numbers of the target's dtype that are held of each token of a block."""
        return self.target.hidden_size

    def block_rows(self, source: HiddenSource, world: int) -> int:
        """Rows whose windows are shuffled together, where the options do not say: 1 GiB of them is held."""
        assert self.options.seq_len is not None  # `settled`
        return max(1, BLOCK_BYTES // (self.options.seq_len * self.numbers_held() * self.target.dtype.itemsize))

    def windows(self, source: HiddenSource, rank: int = 0, world: int = 1) -> WindowSource:
        """The steps of the run."""
        options = self.options
        block_rows = options.block_rows or self.block_rows(source, world)
        sizes = options.window, options.windows_per_step, block_rows, options.seed
        return WindowSource(source, *sizes, rank, world, self.draw)

    @abstractmethod
    def described(self) -> dict[str, Any]:
        """What provenance.json says of the head."""

    @abstractmethod
    def save(self, record: dict[str, Any]) -> None:
        """Writes the head's folder, with what `provenance` returns and the card made from it."""

    @abstractmethod
    def take(self, weights: Mapping[str, Tensor]) -> None:
        """The weights of a trained head, as `Trainer.weights` gives them."""

    def samplings(self) -> dict[str, Sampling]:
        """How texts are written that the head is measured on."""
        return {"t1": Sampling(1.0), "t0": Sampling(0.0)}

    @abstractmethod
    def measure(self, samples: dict[str, Samples]) -> dict[str, Any]:
        """Expected tokens/step of the head in the out folder by temperature, as provenance.json holds them."""

    def lines(self, results: Mapping[str, Any]) -> list[str]:
        """What else the run prints about the results."""
        return []

    def write(self, results: Mapping[str, Any], run: Mapping[str, Any]) -> None:
        """The head's folder, with what is known of it so far."""
        self.save(provenance(self.options, self.described(), self.verifier, results, run))

    def finish(self, weights: Mapping[str, Tensor], texts: list[Tensor], run: Mapping[str, Any]) -> None:
        """Write the head, measure what was written, and write it again with its results and plots."""
        out, kind = self.options.out, self.kind(self.options)
        self.take(weights)
        self.write({}, run)  # first of all: nothing that follows can lose it
        print(f"head written: {out} ({run['minutes']} minutes, {run['tokens_per_second']:,.0f} tokens/s)")
        try:
            results = self.results(texts, 60 * run["minutes"] / 4) if texts else {}
        except KeyboardInterrupt:
            print(f"SIGINT: not measured; the head is in {out}; to measure it, type: vllm-mtpc eval {out} --data DATA",
                  file=sys.stderr)  # fmt: skip
            raise
        plot_loss(read_metrics(out / METRICS_FILE), out, self.loss_unit(self.options))
        plot_acceptance({kind: results}, out)
        self.write(results, run)
        for name, values in results.items():
            print(
                f"expected tokens/step at T={self.samplings()[name].temperature:g}: {values['tokens_per_step']:.3f} "
                f"(s.e. {values['standard_error']:.3f}, {values['sequences']} held-out continuations)"
            )
        for line in self.lines(results):
            print(line)
        expected = {f"T={self.samplings()[key].temperature:g}": one["tokens_per_step"] for key, one in results.items()}
        print(worth(expected, out))
        print(serve_line(out, self.needs_v2))

    def results(self, texts: list[Tensor], seconds: float) -> dict[str, Any]:
        """What `measure` returns of the texts; where no number was asked for, of those that the seconds allow."""
        count, started = len(texts), time.monotonic()
        if self.options.evaluation_sequences is None:
            results = self.measure(self.held_out(texts[:FEW]))
            count = min(count, int(FEW * seconds / (time.monotonic() - started)) - FEW)
            if count <= FEW:
                print(f"measured on {FEW} texts, to take no longer; --evaluation-sequences {len(texts)}: on more")
                return results
        return self.measure(self.held_out(texts[:count]))

    def held_out(self, texts: list[Tensor]) -> dict[str, Samples]:
        """Continuations of prompts by the target, by temperature."""
        options, samples, ways = self.options, {}, self.samplings()
        with Bar(total=len(texts) * len(ways), desc="held-out continuations", unit="text") as bar:
            for name, sampling in ways.items():
                generator = torch.Generator(self.target.device).manual_seed(SEEDS[name])
                more = {"overhang": options.window, "progress": bar.update}
                samples[name] = generate(self.target, texts, options.evaluation_tokens, sampling, generator, **more)
        return samples


def held_out_prompts(options: TrainOptions, target: Target, documents: Documents) -> list[Tensor]:
    """Prompts (1-D) of held-out documents; none where the options ask for none. Raises UsageError.

    Asked for before training, so that what cannot be measured is said before anything is trained.
    """
    count = SEQUENCES if options.evaluation_sequences is None else options.evaluation_sequences
    if not count:
        return []
    texts = prompts(documents, count, options.evaluation_prompt_tokens, options.seed)
    check_length(target.name, target.config, texts, options.evaluation_tokens + options.window, "--evaluation-tokens")
    return texts


def serve_line(out: object, needs_v2: bool) -> str:
    """What to type for a head. Without a GPU vLLM's Model Runner V2 runs in Triton's interpreter, by a script."""
    if not needs_v2 or torch.cuda.is_available():
        return f"serve it: vllm serve {out}"
    return (
        f"serve it: scripts/v2_on_cpu.sh vllm serve {out} (in the checkout of vllm_mtpc: it needs vLLM's Model Runner "
        f"V2, which has no other way without a GPU; with one: vllm serve {out})"
    )
