"""`vllm-mtpc doctor` of a PTP head: served with seeds, so that what vLLM should accept is known draft by draft."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import torch

from vllm_mtpc.eval import doctor, ptp, ptp_compare, text
from vllm_mtpc.eval.arguments import sampling_defaults
from vllm_mtpc.eval.loading import load
from vllm_mtpc.proposers.config.groups import VARIANTS

if TYPE_CHECKING:
    from vllm_mtpc.config.ptp import PtpConfig

REFUSAL = "method 'ptp' on Model Runner V1"  # the beginning of the line with which serving refuses


def diagnose_ptp(
    args: argparse.Namespace, config: PtpConfig, engine: dict[str, Any], prompts: list[list[int]], drafts: int
) -> doctor.Diagnosis:
    """Serves ``prompts`` and compares; where that cannot be, checks the head without vLLM and raises UsageError."""
    draft_pass = args.draft_pass or "two-pass"
    engine["speculative_config"] |= {
        "method": "ptp",
        "draft_pass": draft_pass,
        "max_aux_rows": engine["max_num_seqs"] * _rows(config.variant, drafts, draft_pass),
    }
    how = argparse.Namespace(temperature=args.temperature, top_k=None, top_p=None)
    sampling_defaults(how, config)
    temperatures = how.temperature if args.temperature else how.temperature[::-1]
    seeds = [args.seed * len(prompts) + number for number in range(len(prompts))]
    more = {"sampling": {"top_k": how.top_k, "top_p": how.top_p}, "seeds": seeds}
    try:
        served = doctor._serve(engine, prompts, args, temperatures, REFUSAL, **more)
    except doctor.NotServed:
        print(_without_vllm(args, prompts, drafts, how))
        raise doctor.UsageError(
            "vLLM serves PTP heads on Model Runner V2 alone, which does not run here (it needs a GPU, or a CPU with "
            "Triton), so nothing was compared; the check above needs no vLLM; run doctor on a GPU"
        ) from None
    loaded = load(args.head, args.target, served[0].dtype, args.device)
    comparisons = [
        ptp_compare.compare_ptp(
            loaded,
            prompts,
            answer,
            seeds,
            loaded.sampling(answer.temperature, how.top_p, how.top_k),
            drafts,
            draft_pass,
        )
        for answer in served
    ]
    if any(comparison.differs for comparison in comparisons):
        cause = ptp_compare.find(loaded, comparisons, drafts)
    else:
        cause = ptp_compare.knows_nothing(loaded, comparisons)
    recorded = "two_pass_" if draft_pass == "two-pass" else ""
    notes = [*_checks(comparisons), *doctor._notes(loaded, args, comparisons, recorded)]
    return doctor.Diagnosis(comparisons, cause, doctor._verdict(comparisons, cause), notes)


def _rows(variant: str, drafts: int, draft_pass: str) -> int:
    """Auxiliary rows of a request with which nothing is cut."""
    return drafts + 1 if draft_pass == "two-pass" else (drafts + 1) * (drafts + VARIANTS[variant])


def _checks(comparisons: list[ptp_compare.PtpComparison]) -> list[str]:
    """The shuffled-u check of the sampled text."""
    return [
        ptp_compare.shuffled_line(f"T={comparison.sampling.temperature:g}", ptp.summarise(comparison.windows))
        for comparison in comparisons
        if not comparison.sampling.greedy
    ]


def _without_vllm(args: argparse.Namespace, prompts: list[list[int]], drafts: int, how: argparse.Namespace) -> str:
    """The shuffled-u check on text that the Hugging Face target writes."""
    loaded = load(args.head, args.target, args.dtype, args.device)
    temperature = max(how.temperature) or loaded.config.trained_temperature
    sampling = loaded.sampling(temperature, how.top_p, how.top_k)
    generator = torch.Generator(loaded.target.device).manual_seed(args.seed)
    rows = [torch.tensor(prompt) for prompt in prompts]
    samples = text.generate(loaded.target, rows, args.max_tokens, sampling, generator, overhang=drafts)
    figures = ptp.measure_ptp(loaded.student, samples, sampling, drafts, args.seed)
    return ptp_compare.shuffled_line(f"T={temperature:g}, without vLLM", figures) + (
        f"; {figures.tokens_per_step:.3f} tokens/step in a merged pass, {figures.two_pass_tokens_per_step:.3f} in two"
    )
