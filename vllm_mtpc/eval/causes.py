"""Why served and predicted acceptance differ: each cause is a check that is run, in the order of what explains most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm_mtpc.eval.acceptance import Figures, collect, summarise
from vllm_mtpc.eval.loading import join

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vllm_mtpc.circuits import CircuitParams
    from vllm_mtpc.eval.compare import Comparison
    from vllm_mtpc.eval.loading import Loaded
    from vllm_mtpc.eval.text import Samples

NEAR_CHANCE = 0.15  # of the way from chance to what is predicted


class Cause(NamedTuple):
    """``name``: drafts, target, precision, positions, hidden state or head."""

    name: str
    sentence: str


class _Reordered(torch.nn.Module):
    """A head whose position k has the leaves of position order[k]."""

    def __init__(self, head: nn.Module, order: list[int]) -> None:
        super().__init__()
        self.head, self.order, self.circuit = head, order, head.circuit

    def forward(self, hidden: Tensor, num_positions: int | None = None) -> CircuitParams:
        params = self.head(hidden)
        return params._replace(leaf=params.leaf[:, self.order[: num_positions or len(self.order)]])


def find(loaded: Loaded, comparisons: Sequence[Comparison], num_drafts: int) -> Cause:
    """The likeliest cause of a difference; called where one of the comparisons differs."""
    return (
        _number_of_drafts(comparisons, num_drafts)
        or _other_target(loaded, comparisons)
        or _rival(loaded, comparisons, num_drafts)
        or _lost_positions(comparisons)
        or _chance(loaded, comparisons, num_drafts)
        or Cause(
            "head",
            "the target's text, the precision, the number of drafts and the hidden state are as they should be, so the "
            f"weights that were served are not those of {loaded.folder}: look for another head in the server's "
            "speculative_config",
        )
    )


def _number_of_drafts(comparisons: Sequence[Comparison], num_drafts: int) -> Cause | None:
    for comparison in comparisons:
        counted = comparison.served.acceptance
        given = counted.draft_tokens / counted.drafts if counted.drafts else 0
        if round(given) != num_drafts:
            return Cause(
                "drafts",
                f"vLLM checked {given:.1f} drafts per step where {num_drafts} were expected: another "
                "num_speculative_tokens is served",
            )
    return None


def _lost_positions(comparisons: Sequence[Comparison]) -> Cause | None:
    for comparison in comparisons:
        dead = _dead_position(comparison)
        if dead:
            return Cause(
                "drafts",
                f"no draft beyond position {dead} was ever accepted: drafts are lost or cut before verification",
            )
    return None


def _dead_position(comparison: Comparison) -> int:
    """k if drafts 1..k are accepted, and of the next 10 or more were to be expected behind them but none is; else 0."""
    counts, predicted = comparison.served.acceptance.accepted_per_position, comparison.predicted.per_position
    for k in range(1, len(counts)):
        if not counts[k]:
            return k if predicted[k - 1] and counts[k - 1] * predicted[k] / predicted[k - 1] >= 10 else 0
    return 0


def _other_target(loaded: Loaded, comparisons: Sequence[Comparison]) -> Cause | None:
    for comparison in comparisons:
        chain = comparison.chain
        if chain.other_target:
            if comparison.sampling.greedy:
                wrong = f"{chain.differing} of {chain.tokens} greedy tokens"
                shown = f"{wrong} are not its likeliest ones ({chain.ties} ties apart)"
            else:
                shown = f"the sampled text is {chain.surprise:+.1f} standard errors from its law"
            return Cause(
                "target",
                f"the served text is not that of {loaded.target.name}: {shown}; another target, revision, dtype or "
                "tokenizer is served",
            )
    return None


def _rival(loaded: Loaded, comparisons: Sequence[Comparison], num_drafts: int) -> Cause | None:
    """The way of drafting whose prediction is what was served, the nearest one; None where none is near."""
    found: list[tuple[float, Cause]] = []
    for cause, head, samples in _rivals(loaded, comparisons):
        distance, explains = 0.0, True
        for comparison, read in zip(comparisons, samples, strict=True):
            figures = _predict(loaded, comparison, head, read, num_drafts)
            closer = comparison.distance(figures) < 0.5 * comparison.distance(comparison.predicted)
            explains &= comparison.agrees(figures) and (closer or not comparison.differs)
            distance += comparison.distance(figures)
        if explains:
            found.append((distance, cause))
    return min(found)[1] if found else None


def _predict(loaded: Loaded, comparison: Comparison, head: nn.Module, samples: Samples, num_drafts: int) -> Figures:
    contexts = collect(head, loaded.target, samples, comparison.sampling, num_drafts)
    return summarise(contexts, overlap=False)


def _rivals(loaded: Loaded, comparisons: Sequence[Comparison]) -> Iterator[tuple[Cause, nn.Module, list[Samples]]]:
    same = [comparison.samples for comparison in comparisons]
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        sentence = (
            f"what is served is what the head does in {name}: precision costs this head its drafts; serve it in float32"
        )
        yield Cause("precision", sentence), join(loaded.folder, loaded.target, dtype).head, same
    for shift, side in ((1, "before"), (-1, "behind")):
        shifted = [replace(read, draft=read.read.roll(shift, 1)) for read in same]
        sentence = f"what is served is what the head does with the hidden state of the position {side} the right one"
        yield Cause("hidden state", sentence), loaded.head, shifted
    if loaded.draft_layers is not None:
        bare = [replace(read, draft=None) for read in same]
        sentence = "what is served is what the head does with the target's own hidden state, without its draft layers"
        yield Cause("hidden state", sentence), loaded.head, bare
    window = loaded.config.window
    orders = {f"shifted by {by}": [(k + by) % window for k in range(window)] for by in range(1, window)}
    orders |= {"reversed": list(range(window))[::-1]}
    for name, order in orders.items():
        sentence = (
            f"what is served is what the head does with its positions {name}: its weights are read in another order"
        )
        yield Cause("positions", sentence), _Reordered(loaded.head, order), same


def chance(loaded: Loaded, comparison: Comparison, num_drafts: int) -> float:
    """Acceptance at position 1 of drafts from hidden states of unrelated contexts, along the same text."""
    samples = comparison.samples
    known = (samples.tokens >= 0)[:, :-1]
    states, generator = samples.read.clone(), torch.Generator().manual_seed(0)
    order = torch.randperm(int(known.sum()), generator=generator)
    states[known] = samples.read[known][order]
    mixed = replace(samples, draft=states)
    return _predict(loaded, comparison, loaded.head, mixed, num_drafts).per_position[0]


def _chance(loaded: Loaded, comparisons: Sequence[Comparison], num_drafts: int) -> Cause | None:
    for comparison in comparisons:
        floor = chance(loaded, comparison, num_drafts)
        served, predicted = comparison.served.acceptance.per_position[0], comparison.predicted.per_position[0]
        if served - floor < NEAR_CHANCE * (predicted - floor):
            return Cause(
                "hidden state",
                f"drafts at position 1 are accepted in {served:.0%} of steps, as often as for unrelated contexts "
                f"({floor:.0%}): the head reads a wrong hidden state, or its weights are not those of {loaded.folder}",
            )
    return None


def knows_nothing(loaded: Loaded, comparisons: Sequence[Comparison], num_drafts: int) -> Cause | None:
    """A head whose *predicted* drafts are no better than chance was not trained for these weights."""
    for comparison in comparisons:
        floor, predicted = chance(loaded, comparison, num_drafts), comparison.predicted.per_position[0]
        noise = (floor * (1 - floor) / max(1.0, comparison.predicted.steps)) ** 0.5
        if predicted - floor > max(0.02, 3 * noise):
            return None
    verifier = loaded.config.speculators_config.verifier.name_or_path
    return Cause(
        "hidden state",
        f"served as predicted, but drafts are accepted no more often than for unrelated contexts ({floor:.0%}): the "
        f"head is untrained or was trained for other weights than {loaded.target.name} (its verifier: {verifier})",
    )
