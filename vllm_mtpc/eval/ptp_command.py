"""`vllm-mtpc eval` of a PTP head: tokens/step with its groups of rows, and whether it reads u."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from vllm_mtpc.eval import candidates, ptp, ptp_decode, simulate, text
from vllm_mtpc.eval.acceptance import ratio
from vllm_mtpc.proposers.config.groups import GroupTable, choose_groups, drafts_of_rows

if TYPE_CHECKING:
    import argparse

    from torch import Tensor

    from vllm_mtpc.eval.acceptance import Figures
    from vllm_mtpc.eval.loading import LoadedPtp
    from vllm_mtpc.eval.sampling import Sampling

ROWS_PER_DRAFT = (2, 4)  # budgets shown: so many auxiliary rows per draft of a step


@dataclass(frozen=True)
class Merged:
    """The merged pass with a budget of auxiliary rows per request."""

    rows: int
    table: GroupTable  # chosen from this head's histogram, with what it expects
    tokens_per_step: float  # along the texts
    standard_error: float


@dataclass(frozen=True)
class PtpEvaluation:
    """One temperature."""

    temperature: float
    figures: ptp.PtpFigures
    merged: list[Merged]
    simulated: Figures | None  # two passes carried out, u by hash
    candidates: list[candidates.CandidateFigures]
    own_bits: float
    uses_u: bool


def evaluate(
    loaded: LoadedPtp, prompts: list[Tensor], sampling: Sampling, num_drafts: int, args: argparse.Namespace
) -> PtpEvaluation:
    """Everything about one temperature; of ``args``: new_tokens, seed, batch, simulate and candidates."""
    student, target = loaded.student, loaded.target
    generator = torch.Generator(target.device).manual_seed(args.seed)
    label = f"T={sampling.temperature:g}"
    with tqdm(total=len(prompts), desc=f"{label} text", unit="text", disable=None) as bar:
        samples = text.generate(
            target,
            prompts,
            args.new_tokens,
            sampling,
            generator,
            overhang=num_drafts,
            batch=args.batch,
            progress=bar.update,
        )
    windows = ptp.collect(student, samples, sampling, num_drafts, args.seed)
    figures = ptp.summarise(windows)
    simulated = None
    if args.simulate:
        simulated = simulate.figures(_carry_out(loaded, prompts[: args.simulate], sampling, num_drafts, args, label))
    several = []
    for count in [] if sampling.greedy else args.candidates:
        with tqdm(total=len(prompts), desc=f"{label} M={count}", unit="text", disable=None) as bar:
            several.append(
                candidates.measure_candidates(
                    student, prompts, count, args.new_tokens, sampling, num_drafts, args.seed, bar.update
                )
            )
    return PtpEvaluation(
        sampling.temperature,
        figures,
        _merged(loaded, windows, figures, num_drafts),
        simulated,
        several,
        simulate.own_bits(target, samples, len(prompts)),
        ptp.uses_u(figures),
    )


def _carry_out(
    loaded: LoadedPtp, prompts: list[Tensor], sampling: Sampling, num_drafts: int, args: argparse.Namespace, label: str
) -> list[Any]:
    stops, texts = text.stop_ids(loaded.target), []
    for number, prompt in enumerate(tqdm(prompts, desc=f"{label} two passes", unit="text", disable=None)):
        texts.append(
            ptp_decode.continue_prompt(
                "speculative",
                loaded.student,
                prompt,
                args.new_tokens,
                sampling,
                args.seed + number,
                num_drafts,
                stops,
            )
        )
    return texts


def _merged(loaded: LoadedPtp, windows: ptp.Windows, figures: ptp.PtpFigures, num_drafts: int) -> list[Merged]:
    config, found = loaded.config, []
    for factor in ROWS_PER_DRAFT:
        rows = factor * num_drafts
        table = choose_groups(figures.histogram, num_drafts, rows, config.variant, config.window)
        steps = ptp.follow(windows, after=drafts_of_rows(torch.tensor(table.sizes), config.variant))
        found.append(Merged(rows, table, *ratio(steps.tokens, steps.count)))
    return found


def title(loaded: LoadedPtp, drafts: int) -> str:
    config = loaded.config
    informed = "" if config.uses_u else " without u"
    return f"{loaded.folder}: {config.variant}{informed}, n={config.window}, r={config.lora_rank}, K={drafts} drafts"


def rows(results: list[PtpEvaluation]) -> list[tuple[str, list[str]]]:
    """What is printed, a column per temperature."""

    def each(show: Any) -> list[str]:
        return [show(result) for result in results]

    def pair(value: float, error: float) -> str:
        return f"{value:.3f} ± {error:.3f}"

    def positions(values: list[float]) -> str:
        return " ".join(f"{value:.2f}".removeprefix("0") for value in values)

    def simulated(result: PtpEvaluation) -> str:
        figures = result.simulated
        return "-" if figures is None else pair(figures.tokens_per_step, figures.standard_error)

    found = [
        ("tokens/step, merged pass, ideal ± s.e.", each(lambda r: _of(r.figures))),
        *(
            (
                f"  with {results[0].merged[at].rows} auxiliary rows",
                each(lambda r, at=at: pair(r.merged[at].tokens_per_step, r.merged[at].standard_error)),
            )
            for at in range(len(results[0].merged))
        ),
        (
            "tokens/step, two passes",
            each(lambda r: pair(r.figures.two_pass_tokens_per_step, r.figures.two_pass_standard_error)),
        ),
        ("  simulated", each(simulated)),
        ("acceptance per position", each(lambda r: positions(r.figures.per_position))),
        ("P(exactly g drafts accepted)", each(lambda r: positions(r.figures.histogram))),
        ("right drafts, of all", each(lambda r: f"{r.figures.accuracy:.3f}")),
        ("  with the u of other windows", each(lambda r: f"{r.figures.shuffled_accuracy:.3f}")),
        ("bits per token of the text", each(lambda r: f"{r.own_bits:.3f}")),
        ("texts, contexts", each(lambda r: f"{r.figures.sequences}, {r.figures.contexts:,}")),
    ]
    for at, figures in enumerate(max((r.candidates for r in results), key=len)):
        found.append(
            (
                f"tokens/step, best of {figures.candidates} candidates",
                each(lambda r, at=at: _of(r.candidates[at]) if r.candidates else "-"),
            )
        )
    return [row for row in found if set(row[1]) != {"-"}]


def _of(figures: ptp.PtpFigures | candidates.CandidateFigures) -> str:
    return f"{figures.tokens_per_step:.3f} ± {figures.standard_error:.3f}"


def warnings(loaded: LoadedPtp, results: list[PtpEvaluation]) -> list[str]:
    """One line each."""
    config, found = loaded.config, []
    trained = (config.trained_temperature, config.trained_top_k, config.trained_top_p)
    sampled = [result for result in results if result.temperature > 0]
    if config.uses_u and sampled and not any(result.uses_u for result in sampled):
        found.append(
            "warning: the drafts are no worse with the u of other windows, so the head does not read u; train it longer"
        )
    if config.uses_u and any(result.temperature != trained[0] for result in sampled):
        found.append(
            "note: the head was trained at temperature {:g}, top-k {}, top-p {:g}; elsewhere u means other tokens, and "
            "fewer drafts are right".format(*trained)
        )
    return found
