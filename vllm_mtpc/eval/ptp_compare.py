"""A served PTP head against the Hugging Face student along the very same text, and why they differ.

The requests had seeds, so every u is known and with it, up to rounding, which drafts a server accepts: nothing is left
to chance, the predicted counters are the counters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from vllm_mtpc.eval import causes, ptp, text
from vllm_mtpc.eval.acceptance import Figures, ratio
from vllm_mtpc.eval.causes import Cause
from vllm_mtpc.eval.compare import Comparison, check_chain
from vllm_mtpc.eval.ptp_decode import Picker
from vllm_mtpc.heads.ptp.student import UNINFORMED
from vllm_mtpc.kernels.pick import pick
from vllm_mtpc.kernels.uniform import uniform

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_mtpc.engine.served import Served
    from vllm_mtpc.eval.loading import LoadedPtp
    from vllm_mtpc.eval.sampling import Sampling
    from vllm_mtpc.eval.text import Samples

PASSES = ("two-pass", "merged")
BATCH = 8
NOT_PICKED = 0.01  # of the tokens may be others than u picks, by rounding


@dataclass(frozen=True)
class PtpComparison(Comparison):
    """One temperature. ``contexts`` is None: nothing is expected, all is known."""

    u: Tensor | None = None  # [S, L] that picked the tokens
    windows: ptp.Windows | None = None
    draft_pass: str = "two-pass"
    not_picked: float = 0.0  # tokens of the sampled text that are not Pick(u, Q)


class _Coupled:
    """A ``Sampling`` whose tokens are picked by the u of requests with seeds, from lengths[B] on."""

    def __init__(self, sampling: Sampling, seeds: Sequence[int], lengths: Sequence[int], device: torch.device) -> None:
        self.sampling, self.log_probs, self.lengths = sampling, sampling.log_probs, lengths
        self.pickers = [Picker(sampling, seed, device) for seed in seeds]
        self.made = 0

    def pick(self, log_probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        at = [length + self.made for length in self.lengths]
        self.made += 1
        if self.sampling.greedy:
            return log_probs.argmax(-1)
        rows = zip(self.pickers, log_probs, at, strict=True)
        return torch.cat([pick(row[None], picker.u(first, 1)) for picker, row, first in rows])


def compare_ptp(
    loaded: LoadedPtp,
    prompts: Sequence[Sequence[int]],
    served: Served,
    seeds: Sequence[int],
    sampling: Sampling,
    num_drafts: int,
    draft_pass: str,
) -> PtpComparison:
    """What the student should have counted along the served text of requests with ``seeds``.

    The last step of a text looks at drafts past its end: the text is continued as the server would have.
    """
    target = loaded.target
    texts = [torch.tensor([*prompt, *answer]) for prompt, answer in zip(prompts, served.outputs, strict=True)]
    pieces = []
    for start in range(0, len(texts), BATCH):
        part = texts[start : start + BATCH]
        how = _Coupled(sampling, seeds[start : start + BATCH], [len(row) for row in part], target.device)
        pieces.append(text.generate(target, part, 0, how, None, overhang=num_drafts, stops=set(), batch=BATCH))
    samples = text.join(pieces)
    samples = replace(samples, prompt_lengths=torch.tensor([len(prompt) for prompt in prompts]))
    u = known_u(samples, seeds, sampling)
    windows = ptp.collect(loaded.student, samples, sampling, num_drafts, u=u)
    return PtpComparison(
        served=served,
        sampling=sampling,
        samples=samples,
        contexts=None,
        predicted=predict(windows, draft_pass),
        noise=0.0,
        chain=check_chain(target, samples, sampling),
        u=u,
        windows=windows,
        draft_pass=draft_pass,
        not_picked=_not_picked(loaded, samples, sampling, u),
    )


def known_u(samples: Samples, seeds: Sequence[int], sampling: Sampling) -> Tensor:
    """u [S, L] that picked tokens[:, k] in requests with these seeds; greedy: 0.5."""
    if sampling.greedy:
        return torch.full(samples.tokens.shape, UNINFORMED)
    before = torch.arange(samples.tokens.shape[1]) - 1
    rows = torch.tensor(list(seeds))[:, None].expand(samples.tokens.shape)
    u = uniform(rows.flatten(), before.clamp(min=0).expand_as(rows).flatten())
    return u.view(rows.shape)


def predict(windows: ptp.Windows, draft_pass: str) -> Figures:
    """Counters of a server with rows for every group."""
    steps = ptp.follow(windows, two_pass=draft_pass == "two-pass")
    value, error = ratio(steps.tokens, steps.count)
    law = steps.histogram / steps.histogram.sum()
    return Figures(
        tokens_per_step=value,
        standard_error=error,
        per_position=law.flip(0).cumsum(0).flip(0)[1:].tolist(),
        anywhere=math.nan,
        sequences=len(windows.valid),
        contexts=int(windows.valid.sum()),
        steps=steps.count.sum().item(),
    )


@torch.inference_mode()
def _not_picked(loaded: LoadedPtp, samples: Samples, sampling: Sampling, u: Tensor) -> float:
    if sampling.greedy:
        return 0.0
    wrong = count = 0
    for row in range(len(samples.tokens)):
        start, end = int(samples.prompt_lengths[row]), int(samples.lengths[row])
        states = samples.hidden[row, start - 1 : end - 1].to(loaded.target.device)
        log_q = sampling.log_probs(loaded.target.logits(states))
        picked = pick(log_q, u[row, start:end].to(log_q.device)).cpu()
        wrong, count = wrong + int((picked != samples.tokens[row, start:end]).sum()), count + end - start
    return wrong / max(1, count)


def find(loaded: LoadedPtp, comparisons: Sequence[PtpComparison], num_drafts: int) -> Cause:
    """The likeliest cause of a difference; called where one of the comparisons differs."""
    return (
        causes._number_of_drafts(comparisons, num_drafts)
        or causes._other_target(loaded, comparisons)
        or _other_numbers(comparisons)
        or _rival(loaded, comparisons, num_drafts)
        or causes._lost_positions(comparisons)
        or Cause(
            "head",
            "the target's text, its u and the number of drafts are as they should be, so the weights that were served "
            f"are not those of {loaded.folder}, or their precision costs drafts: look for another head in the server's "
            "speculative_config, or serve in float32",
        )
    )


def _other_numbers(comparisons: Sequence[PtpComparison]) -> Cause | None:
    for comparison in comparisons:
        if comparison.not_picked > NOT_PICKED:
            return Cause(
                "u",
                f"{comparison.not_picked:.0%} of the sampled tokens are not what their u picks: the server draws other "
                "numbers, or does not verify by u",
            )
    return None


def _rival(loaded: LoadedPtp, comparisons: Sequence[PtpComparison], num_drafts: int) -> Cause | None:
    """The wrong numbers on the rows with which the student does what was served, the nearest; None where none is near.

    Greedy rows all carry one number: these comparisons have to agree as they are.
    """
    sampled = [comparison for comparison in comparisons if not comparison.sampling.greedy]
    if not sampled or any(comparison.differs for comparison in comparisons if comparison.sampling.greedy):
        return None
    found: list[tuple[float, str]] = []
    for what, shift in _SHIFTS.items():
        distance, explains = 0.0, True
        for comparison in sampled:
            figures = predict(_with_numbers(loaded, comparison, num_drafts, shift), comparison.draft_pass)
            closer = comparison.distance(figures) < 0.5 * comparison.distance(comparison.predicted)
            explains &= comparison.agrees(figures) and (closer or not comparison.differs)
            distance += comparison.distance(figures)
        if explains:
            found.append((distance, what))
    if not found:
        return None
    return Cause("u", f"what is served is what the student does with {min(found)[1]} on its rows")


_SHIFTS = {
    "the u of the position before the right one": 1,
    "the u of the position behind the right one": -1,
    "the u of other requests or positions": None,
}


def _with_numbers(loaded: LoadedPtp, comparison: PtpComparison, num_drafts: int, shift: int | None) -> ptp.Windows:
    """Windows whose rows carry the u of ``shift`` positions before, or of other windows (None)."""
    if shift is None:
        return comparison.windows._replace(right=comparison.windows.shuffled)
    numbers = {"u": comparison.u, "carried": comparison.u.roll(shift, 1)}
    return ptp.collect(loaded.student, comparison.samples, comparison.sampling, num_drafts, **numbers)


def knows_nothing(loaded: LoadedPtp, comparisons: Sequence[PtpComparison]) -> Cause | None:
    """A head that is served as predicted, but whose drafts are no better than with the u of other windows."""
    if not loaded.config.uses_u:
        return None
    sampled = [comparison for comparison in comparisons if not comparison.sampling.greedy]
    if not sampled or any(ptp.uses_u(ptp.summarise(comparison.windows)) for comparison in sampled):
        return None
    return Cause(
        "u",
        "served as predicted, but drafts are as good with the u of other windows: the head does not read u; it is "
        f"untrained, or was trained for other weights than {loaded.target.name}",
    )


def shuffled_line(label: str, figures: ptp.PtpFigures) -> str:
    """The shuffled-u check in a line."""
    return (
        f"{label}: {figures.accuracy:.1%} of the drafts are right, {figures.shuffled_accuracy:.1%} with the u of other "
        "windows"
    )
