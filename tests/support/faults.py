"""Faults and recorders that tests put into an engine's process: one table of named attributes and their replacements.

An entry of `FAULTS` maps the path of an attribute of vLLM or of this package to a function that receives the original
and returns its replacement. Entries whose replacements share state are functions that return such a mapping. A path
that does not exist raises, so that a fault cannot be lost by renaming what it replaces.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import ExitStack
from pkgutil import resolve_name
from typing import Any
from unittest import mock

from tests.support import recorders
from tests.support.recorders import (
    PROPOSE,
    PROPOSER,
    PTP,
    RECORDED,
    SPECULATOR,
    V1,
    V2,
    VERIFICATION,
    Patches,
    wrapping,
)

V1_GREEDY = "vllm.v1.sample.rejection_sampler.rejection_sample"  # of steps whose requests are all greedy
V1_REJECTION = "vllm_mtpc.proposers.v1.verification.rejection_sample"
V2_REJECTION = "vllm.v1.worker.gpu.spec_decode.rejection_sampler.rejection_sample"
V2_SAMPLER = "vllm.v1.worker.gpu.spec_decode.rejection_sampler.RejectionSampler.__call__"
BACKBONE = f"{V2}.backbone_speculator.BackboneSpeculator"
GRAMMAR = "vllm_mtpc.proposers.worker.grammar_masks"
PLAN = "vllm_mtpc.plan.online_plan.OnlinePlan"
UNIFORM = 0.15  # the share of a uniform distribution in a wrong q
MARKED = 0  # the token whose drafts are thrown away
LENGTHS = (3, 1, 0, 2)  # numbers of drafts, in turns


def inject(*names: str) -> Callable[[], None]:
    """Put named faults into this process; returns the function that removes them."""
    stack = ExitStack()
    for name in names:
        patches = FAULTS[name]
        for path, replace in (patches() if callable(patches) else patches).items():
            owner_path, _, attribute = path.rpartition(".")
            owner = resolve_name(owner_path)
            stack.enter_context(mock.patch.object(owner, attribute, replace(getattr(owner, attribute))))
    return stack.close


def _constant(value: Any) -> Callable[[Any], Any]:
    return lambda original: value


def _clocked(seconds: Callable[[int], float]) -> Callable[[Any], Any]:
    """Give the plan seconds(K) in the place of a step's seconds, and record K."""

    @wrapping
    def finish_step(
        original: Any, self: Any, elapsed: float, batch: int, verified: int, drafted: int, *rest: Any
    ) -> Any:
        RECORDED.append(drafted)
        return original(self, seconds(drafted), batch, verified, drafted, *rest)

    return finish_step


# Verification


@wrapping
def _drop_recovered_v1(original: Any, drafts: Any, num_drafts: list[int], *args: Any, **kwargs: Any) -> Any:
    output = original(drafts, num_drafts, *args, **kwargs)
    for row, drafted in zip(output, num_drafts, strict=True):
        emitted = int((row >= 0).sum())
        if 1 < emitted <= drafted:
            row[emitted - 1] = -1
    return output


def _changing_seconds() -> Callable[[int], float]:
    """Return a clock in which each draft costs nothing, then five steps, in turns of 40 steps."""
    steps = itertools.count()
    return lambda drafts: 0.01 * (1 + 5 * drafts * (next(steps) // 40 % 2))


@wrapping
def _drop_recovered_v2(original: Any, logits: Any, q: Any, drafts: Any, ends: Any, *args: Any, **more: Any) -> Any:
    sampled, counts = original(logits, q, drafts, ends, *args, **more)
    return sampled, counts - ((counts > 1) & (counts <= ends.diff() - 1)).to(counts.dtype)


@wrapping
def _uniform_in_q_v1(original: Any, *args: Any, **more: Any) -> Any:
    q = (1 - UNIFORM) * args[4] + UNIFORM / args[4].shape[-1]
    return original(*args[:4], q, *args[5:], **more)


@wrapping
def _uniform_in_q_v2(original: Any, logits: Any, draft_logits: Any, *args: Any, **more: Any) -> Any:
    """For requests at temperature 1."""
    mixed = (1 - UNIFORM) * draft_logits.float().softmax(-1) + UNIFORM / draft_logits.shape[-1]
    return original(logits, mixed.log(), *args, **more)


@wrapping
def _surplus_as_forbidden(original: Any, self: Any, logits: Any, batch: Any, draft_logits: Any, invalid: Any) -> Any:
    """Take the token in the place of a draft that was not asked for from what remains without this draft."""
    if invalid is not None:
        rows = invalid.nonzero()[:, 0]
        logits = logits.clone()
        logits[rows - 1, batch.input_ids[batch.logits_indices[rows]].long()] = float("-inf")
    return original(self, logits, batch, draft_logits, None)


def _noise_of_first_row() -> Patches:
    """Draw the target's tokens with the noise of the step's first row."""
    first_rows: list[Any] = []

    @wrapping
    def verify(original: Any, self: Any, *args: Any) -> Any:
        pos, begins = args[3:5]  # after logits, draft logits and drafts
        first_rows[:] = [pos[begins[:-1].long()].repeat_interleave(begins.diff(), output_size=len(pos))]
        return original(self, *args)

    @wrapping
    def sample(original: Any, logits: Any, slots: Any, t: Any, seeds: Any, pos: Any, **given: Any) -> Any:
        return original(logits, slots, t, seeds, first_rows[0], **given)

    return {f"{VERIFICATION}.HeadSampler._verify": verify, f"{VERIFICATION}.gumbel_sample": sample}


# Drafts


@wrapping
def _one_stream(original: Any, self: Any, *args: Any) -> None:
    self.first_pos %= resolve_name(f"{VERIFICATION}.DRAFTING")
    original(self, *args)


@wrapping
def _own_stream(original: Any, self: Any, num_reqs: int, num_drafts: int) -> None:
    self.first_pos[:num_reqs] += resolve_name(f"{VERIFICATION}.DRAFTING")
    original(self, num_reqs, num_drafts)


@wrapping
def _scored_without_tokens(original: Any, self: Any, *args: Any) -> None:
    original(self, *args)
    drawn = self.draft_tokens.clone()
    self.model.leaves.bigram = lambda *_: None  # hides the method
    original(self, *args)
    del self.model.leaves.bigram
    self.draft_tokens.copy_(drawn)


@wrapping
def _length_of_drawn(original: Any, self: Any) -> Any:
    """Verify drafts up to the first MARKED one: the length depends on what was drawn."""
    made, states = original(self), self.req_states
    for row, name in enumerate(made.req_ids if made else ()):
        drawn = states.draft_tokens[states.req_id_to_index[name], : len(made.draft_token_ids[row])].tolist()
        made.draft_token_ids[row] = list(itertools.takewhile(lambda token: token != MARKED, drawn))
    return made


@wrapping
def _length_of_drawn_v1(original: Any, *args: Any) -> list[list[int]]:
    return [list(itertools.takewhile(lambda token: token != MARKED, drafts)) for drafts in original(*args)]


def _lengths_in_turns(original: Any) -> Any:
    lengths = itertools.cycle(LENGTHS)

    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.dynamic_sd_lookup = [next(lengths)] * (1 + self.max_num_running_reqs)
        return original(self, *args, **kwargs)

    return schedule


# Grammars


@wrapping
def _wait_for_grammar(original: Any, self: Any, name: str, params: Any) -> None:
    original(self, name, params)
    while (follower := self.followers.get(name)) and follower.compiling and follower.compiling.grammar is None:
        time.sleep(0.001)


def _scored_unmasked_v1() -> Patches:
    """Draw drafts from the masked distribution, and hand the unmasked one to the rejection sampler."""
    running: list[Any] = []

    @wrapping
    def propose(original: Any, self: Any, *args: Any) -> Any:
        running[:] = [self]
        return original(self, *args)

    @wrapping
    def around(original: Any, self: Any, pick: Any, ids: Any) -> Any:
        masked = original(self, pick, ids)

        def scored(log_q: Any, k: int) -> Any:
            q = log_q.softmax(-1)
            drafts = masked(log_q, k)
            running[0].draft_probs[: len(q), k] = q
            return drafts

        return scored

    return {f"{PROPOSER}.propose": propose, f"{GRAMMAR}.Masks.around": around, **GRAMMARS_COMPILED}


@wrapping
def _scored_unmasked_v2(original: Any, self: Any, *args: Any) -> None:
    unmasked = self.draft_logits.clone()
    original(self, *args)
    self.draft_logits.copy_(unmasked)


# Draft layers, backbones, PTP


@wrapping
def _shifted(original: Any, self: Any, states: Any, positions: Any, slots: Any) -> Any:
    return original(self, states, positions + 1, slots)


@wrapping
def _stale_rows(original: Any, self: Any, positions: Any, states: Any) -> Any:
    return original(self, positions, states.roll(1, dims=0))


@wrapping
def _squared(original: Any, *args: Any) -> Any:
    return original(*args) ** 2


GRAMMARS_COMPILED: Patches = {f"{GRAMMAR}.Grammars.start": _wait_for_grammar}
NOTED_STATES: Patches = {PROPOSE: recorders.after_propose(recorders.state_and_drafts)}

FAULTS: dict[str, Patches | Callable[[], Patches]] = {
    # verification
    "drop_recovered": {V1_REJECTION: _drop_recovered_v1, V1_GREEDY: _drop_recovered_v1},
    "drop_recovered_v2": {V2_REJECTION: _drop_recovered_v2},
    "other temperature": {V2_REJECTION: lambda original: lambda logits, *a, **k: original(logits / 1.25, *a, **k)},
    "uniform in q": {V1_REJECTION: _uniform_in_q_v1},
    "uniform in q, V2": {V2_REJECTION: _uniform_in_q_v2},
    "surplus drafts as forbidden": {V2_SAMPLER: _surplus_as_forbidden},
    "noise of the first row": _noise_of_first_row,
    "noise of other tokens": {
        f"{V1}.verification.sample_tokens": lambda original: (
            lambda logits, numbers: original(logits, numbers.roll(-1) + 1)
        )
    },
    "noise of positions": {
        f"{V2}.speculator.step_seeds": _constant(lambda seeds, anchor: seeds),
        f"{VERIFICATION}.step_seeds": _constant(lambda seeds, anchor: seeds),
    },
    "noted_seeds": {
        f"{V2}.speculator.step_seeds": recorders.noted_seeds("speculator"),
        f"{VERIFICATION}.step_seeds": recorders.noted_seeds("verification"),
    },
    # drafts
    "one stream": {f"{SPECULATOR}._generate_draft": _one_stream},
    "drafts of their own": {f"{SPECULATOR}._generate_draft": _own_stream},
    "drafts of their own v1": {
        f"{V1}.proposer.peek_numbers": lambda original: lambda generator, count: original(generator, count) ^ 1
    },
    "scored without tokens": {f"{SPECULATOR}._generate_draft": _scored_without_tokens},
    "drawn cut v1": {f"{PROPOSER}.propose": _length_of_drawn_v1},
    "drawn cut": {"vllm.v1.worker.gpu.model_runner.GPUModelRunner.take_draft_token_ids": _length_of_drawn},
    "switching": {"vllm.v1.core.sched.scheduler.Scheduler.schedule": _lengths_in_turns},
    "circuit in graphs": lambda: recorders.in_graphs(SPECULATOR, "FULL"),
    "noted drafts v1": {f"{PROPOSER}.propose": recorders.drafts_v1},
    # the online plan
    "free drafts": {f"{PLAN}.finish_step": _clocked(lambda drafts: 0.01)},
    "dear drafts": {f"{PLAN}.finish_step": _clocked(lambda drafts: 0.01 * (1 + 5 * drafts))},
    "changing costs": lambda: {f"{PLAN}.finish_step": _clocked(_changing_seconds())},
    # grammars
    "grammars waited for": GRAMMARS_COMPILED,
    "grammars never compiled": {f"{GRAMMAR}.Grammars._compile": _constant(lambda self, *args: None)},
    "unmasked drafts": {f"{GRAMMAR}.Grammars.masks": _constant(lambda *args: resolve_name(f"{GRAMMAR}.Masks")(None))},
    "masked drafts scored unmasked": _scored_unmasked_v1,
    "masked drafts scored unmasked on V2": {
        f"{SPECULATOR}._generate_masked_draft": _scored_unmasked_v2,
        **GRAMMARS_COMPILED,
    },
    "noted drafts": {
        "vllm.v1.structured_output.StructuredOutputManager.validate_tokens": recorders.validated_drafts,
        **GRAMMARS_COMPILED,
    },
    # states that heads read, and draft layers and backbones with faults
    "noted states": NOTED_STATES,
    "layers stale trunk": {f"{V2}.layered.ServedDraftLayers.forward": _stale_rows, **NOTED_STATES},
    "backbone in graphs": lambda: recorders.in_graphs(BACKBONE, "FULL", NOTED_STATES[PROPOSE]),
    "backbone context one on": {f"{V2}.backbone_speculator.ServedBackbone.write_context": _shifted, **NOTED_STATES},
    # PTP
    "squared_u": {
        "vllm_mtpc.kernels.pick.naive.uniform": _squared,
        f"{V2}.ptp.ptp_speculator.u_of": _squared,
    },
    "coupled_without_drafts": {
        "vllm.v1.worker.gpu.model_runner.Sampler": lambda _: resolve_name(f"{VERIFICATION}.CoupledSampler")
    },
    "oracle": recorders.oracle,
    "record_groups": recorders.groups,
    "replayed": lambda: recorders.in_graphs(PTP, "FULL_DECODE_ONLY"),
    # memory
    "measured_as_on_a_gpu": recorders.profiled_as_on_a_gpu,
    "poisoned": recorders.poisoned,
    "freed_early": lambda: recorders.poisoned(early=4),
}
