"""A PTP head's part of a training run: what it starts from, what it is trained with, what is written in the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from vllm_mtpc.checkpoint import read_config, resolve_head
from vllm_mtpc.checkpoint.ptp import load_ptp, load_student, save_ptp
from vllm_mtpc.config.ptp import PtpConfig
from vllm_mtpc.errors import UsageError
from vllm_mtpc.eval.sampling import Sampling
from vllm_mtpc.eval.text import Samples, generate
from vllm_mtpc.heads.ptp.student import Student
from vllm_mtpc.progress import Bar
from vllm_mtpc.train import prepare
from vllm_mtpc.train.figures import SEEDS
from vllm_mtpc.train.loop import METRICS_FILE, read_metrics
from vllm_mtpc.train.options import TrainOptions
from vllm_mtpc.train.ptp.card import ptp_card, ptp_record
from vllm_mtpc.train.ptp.drafter import PtpDrafter
from vllm_mtpc.train.ptp.source import PrefixSource, default_block_rows, drawing
from vllm_mtpc.train.windows import WindowSource

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_mtpc.data.rows import Rows
    from vllm_mtpc.hf import Target

# Shuffled u has to cost an informed head at least this share of its right drafts, or u is hardly used.
SHUFFLE_COST = 0.1


class PtpJob:
    """What `vllm_mtpc.train.run` asks of a kind of head, for PTP heads."""

    def __init__(self, options: TrainOptions, target: Target) -> None:
        self.options, self.target = options, target
        self.config = ptp_config(options, target)
        torch.manual_seed(options.seed)
        self.student = Student(target, self.config)
        if options.init_from:
            start_from(self.student, options.init_from)
        if options.late_only:
            self.student.requires_grad_(False).late.requires_grad_(True)

    def drafter(self) -> PtpDrafter:
        return PtpDrafter(self.student, self.options)

    def source(self, rows: Rows) -> PrefixSource:
        return PrefixSource(self.student, rows, self.options)

    def windows(self, source: PrefixSource, rank: int, world: int) -> WindowSource:
        options = self.options
        block_rows = options.block_rows or default_block_rows(self.student, options.seq_len)
        draw = drawing(options.window, options.u_beta)
        return WindowSource(
            source, options.window, options.windows_per_step, block_rows, options.seed, rank, world, draw=draw
        )

    def write(self, figures: Mapping[str, Any], run: Mapping[str, Any]) -> None:
        """The head's folder, with its card and provenance."""
        values = ptp_record(self.options, self.config, figures, run)
        save_ptp(
            self.options.out,
            self.config,
            self.student.lora(),
            self.student.embedding,
            values,
            ptp_card(values),
            getattr(torch, self.options.dtype),
            self.student.late,
        )

    def finish(self, weights: Mapping[str, Tensor], prompts: list[Tensor], run: Mapping[str, Any]) -> None:
        """Write the head, measure what was written, and write it again with its figures and plots."""
        from vllm_mtpc.plots.heads import plot_acceptance, plot_loss

        self.student.load_state_dict(weights, strict=not self.options.late_only)  # what was not trained is not there
        self.write({}, run)  # first of all: nothing that follows can lose it
        figures = measured(self.options, self.target, prompts) if prompts else {}
        plot_loss(read_metrics(self.options.out / METRICS_FILE), self.options.out, self.options.loss_unit)
        if figures:
            plot_acceptance({self.config.variant: figures}, self.options.out)
            self.config = self.config.model_copy(update={"accepted": figures["t1"]["histogram"]})
        self.write(figures, run)
        print(f"head written: {self.options.out} ({run['minutes']} minutes, {run['tokens_per_second']:,.0f} tokens/s)")
        for line in figure_lines(self.options, figures):
            print(line)
        print(prepare.serve_line(self.options.out, needs_v2=True))


def ptp_config(options: TrainOptions, target: Target) -> PtpConfig:
    """The config of the head that the run writes."""
    layers = len(getattr(target.backbone, "layers", ()))  # a target without any is refused by the student
    sizes = {"vocab_size": target.vocab_size, "hidden_size": target.hidden_size, "num_hidden_layers": max(1, layers)}
    return PtpConfig.create(
        variant=options.variant,
        window=options.window,
        target={**target.config.to_dict(), "architectures": target.model.config.architectures, **sizes},
        verifier=options.verifier or prepare.verifier_name(options.target, options.out),
        informed=options.informed,
        u_embedding=options.u_embedding,
        u_features=options.u_features,
        u_hidden=options.u_hidden,
        late_width=options.late_width,
        law_trust=options.law_trust,
        lora_rank=options.lora_rank,
        lora_alpha=float(options.lora_alpha),
        num_speculative_tokens=options.num_speculative_tokens,
        trained_temperature=options.temperature,
        trained_top_k=options.top_k,
        trained_top_p=options.top_p,
    )


def start_from(student: Student, name: str) -> None:
    """Take the weights of another PTP head of the same shapes. Raises UsageError where they differ."""
    config = read_config(resolve_head(name))
    if not isinstance(config, PtpConfig):
        raise UsageError(
            f"init_from={name} is a head of method mtpc; a PTP head starts from a PTP head: name one, or remove it"
        )
    for key in ("variant", "u_embedding", "u_features", "u_hidden", "lora_rank", "lora_alpha"):
        ours, theirs = getattr(student.config, key), getattr(config, key)
        if ours != theirs:
            raise UsageError(f"init_from={name} has {key}={theirs}, this run {ours}; set {key} to {theirs}")
    if config.late_width not in (0, student.config.late_width):  # a head without a late network is given a new one
        raise UsageError(
            f"init_from={name} has late_width={config.late_width}, this run {student.config.late_width}; set "
            f"late_width to {config.late_width}"
        )
    head = load_ptp(resolve_head(name))
    student.take(head.lora, head.embedding, head.late)


def samplings(options: TrainOptions) -> dict[str, Sampling]:
    """How the texts are written that a head is measured on: at the trained temperature, and greedy."""
    law = {"temperature": options.temperature, "top_p": options.top_p}
    if options.top_k:
        law["top_k"] = options.top_k
    return {"t1": Sampling(**law), "t0": Sampling(0.0)}


def held_out(options: TrainOptions, target: Target, prompts: list[Tensor]) -> dict[str, Samples]:
    """Continuations of prompts by the target."""
    samples, ways = {}, samplings(options)
    with Bar(total=len(prompts) * len(ways), desc="held-out continuations", unit="text") as bar:
        for name, sampling in ways.items():
            samples[name] = generate(
                target,
                prompts,
                options.evaluation_tokens,
                sampling,
                torch.Generator(target.device).manual_seed(SEEDS[name]),
                overhang=options.window,
                progress=bar.update,
            )
    return samples


def measured(options: TrainOptions, target: Target, prompts: list[Tensor]) -> dict[str, Any]:
    """Figures of the head in the out folder, as provenance.json holds them."""
    from vllm_mtpc.eval.ptp_acceptance import measure_ptp

    student, figures = load_student(options.out, target), {}
    ways = samplings(options)
    for name, samples in held_out(options, target, prompts).items():
        found = measure_ptp(student, samples, ways[name], num_drafts=options.window - 1, seed=options.seed)
        figures[name] = found.as_dict()
    return figures


def figure_lines(options: TrainOptions, figures: Mapping[str, Any]) -> list[str]:
    """What the run prints about the figures."""
    lines = []
    for name, values in figures.items():
        temperature = options.temperature if name == "t1" else 0
        lines.append(
            f"expected tokens/step at T={temperature:g}: {values['tokens_per_step']:.3f} "
            f"(s.e. {values['standard_error']:.3f}, {values['sequences']} held-out continuations)"
        )
    if "t1" in figures:
        right, shuffled = figures["t1"]["accuracy"], figures["t1"]["shuffled_accuracy"]
        lines.append(f"drafts that are right: {right:.1%}; with the u of other windows: {shuffled:.1%}")
        uses_u = options.informed or options.law_trust is not None
        if uses_u and shuffled > (1 - SHUFFLE_COST) * right:
            lines.append(
                "warning: drafts are as good with the u of other windows, so u is not used: train longer, or raise "
                "learning_rate or lora_rank"
            )
    return lines
