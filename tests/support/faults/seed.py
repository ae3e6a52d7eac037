"""Faults of coupled verification, and notes of what is drafted for which batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support import engine

Undo = Callable[[], None]


def other_noise(of_first_row: bool = False, **replaced: Any) -> Callable[[], Undo]:
    """The target's tokens are drawn with other noise: of the step's first row, or of another stream.

    Without the check of the noise at start, which would find it before any text.
    """

    def inject() -> Undo:
        from vllm_mtpc.proposers.v2 import verification

        verify, sample, check = verification.Verifier._verify, verification.gumbel_sample, verification.check_noise
        first_rows: list[Any] = []

        def _verify(self: Any, logits: Any, draft_logits: Any, drafts: Any, pos: Any, begins: Any, *args: Any) -> Any:
            rows = begins.diff()
            first_rows[:] = [pos[begins[:-1].long()].repeat_interleave(rows, output_size=len(pos))]
            return verify(self, logits, draft_logits, drafts, pos, begins, *args)

        def gumbel_sample(logits: Any, slots: Any, temperature: Any, seeds: Any, pos: Any, **given: Any) -> Any:
            at = first_rows[0] if of_first_row else pos
            return sample(logits, slots, temperature, seeds, at, **{**given, **replaced})

        verification.Verifier._verify, verification.gumbel_sample = _verify, gumbel_sample
        verification.check_noise = lambda *given: None

        def undo() -> None:
            verification.Verifier._verify, verification.gumbel_sample = verify, sample
            verification.check_noise = check

        return undo

    return inject


def other_numbers() -> Undo:
    """Model Runner V1: the number of a token is that of the one behind."""
    from vllm_mtpc.proposers.v1 import runner

    draw = runner.draw
    return engine.replaced(runner, "draw", lambda logits, numbers: draw(logits, numbers.roll(-1) + 1))


def drafts_of_their_own() -> Undo:
    """Model Runner V2: drafts of coupled requests take noise of the drafting stream as well."""
    from vllm_mtpc.proposers.v2.speculator import MtpcSpeculator
    from vllm_mtpc.proposers.v2.verification import DRAFTING

    draft = MtpcSpeculator._generate_draft

    def _draft(self: Any, num_reqs: int, num_drafts: int) -> None:
        self.noise_pos[:num_reqs] += DRAFTING
        draft(self, num_reqs, num_drafts)

    return engine.replaced(MtpcSpeculator, "_generate_draft", _draft)


def numbers_of_their_own() -> Undo:
    """The same on V1."""
    from vllm_mtpc.proposers.v1 import proposer

    read_ahead = proposer.read_ahead
    return engine.replaced(proposer, "read_ahead", lambda generator, count: read_ahead(generator, count) ^ 1)


def noted_seeds() -> Undo:
    """Notes (module, seed, position of the step's first row) of every row whose seed is made a step's."""
    from vllm_mtpc.proposers.v2 import speculator, verification

    original = verification.step_seeds

    def noting(module: Any) -> Any:
        def step_seeds(seeds: Any, anchor: Any) -> Any:
            rows = zip(seeds.tolist(), anchor.tolist(), strict=True)
            engine.RECORDED.extend((module.__name__.rpartition(".")[2], *row) for row in rows)
            return original(seeds, anchor)

        return step_seeds

    def undo() -> None:
        speculator.step_seeds = verification.step_seeds = original

    for module in (speculator, verification):
        module.step_seeds = noting(module)
    return undo


def note_lengths() -> Undo:
    """Notes (requests, drafts each) of every step, on Model Runner V2."""
    from vllm_mtpc.proposers.v2.speculator import MtpcSpeculator

    propose = MtpcSpeculator.propose

    def noting(self: Any, input_batch: Any, *args: Any, num_speculative_tokens: int | None = None, **more: Any) -> Any:
        engine.RECORDED.append((input_batch.num_reqs, num_speculative_tokens))
        return propose(self, input_batch, *args, num_speculative_tokens=num_speculative_tokens, **more)

    return engine.replaced(MtpcSpeculator, "propose", noting)


def note_lengths_v1() -> Undo:
    """The same on V1."""
    from vllm_mtpc.proposers.v1.proposer import MtpcProposer

    propose = MtpcProposer.propose

    def noting(self: Any, *args: Any, **more: Any) -> Any:
        drafts = propose(self, *args, **more)
        engine.RECORDED.append((len(drafts), max(map(len, drafts))))
        return drafts

    return engine.replaced(MtpcProposer, "propose", noting)


INJECTED = {
    "noted_seeds": noted_seeds,
    "noise of the first row": other_noise(of_first_row=True),
    "noise of drafts": other_noise(is_drafting=True),
    "drafts of their own": drafts_of_their_own,
    "drafts of their own v1": numbers_of_their_own,
    "noted lengths": note_lengths,
    "noise of other tokens": other_numbers,
    "noted lengths v1": note_lengths_v1,
}
