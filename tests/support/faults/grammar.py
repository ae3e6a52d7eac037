"""Faults of drafting under a grammar, injected inside an engine's process, and a note of what was drafted."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tests.support import engine

Undo = Callable[[], None]


def compiled() -> Undo:
    """Every grammar is waited for, so that all drafts of its request are masked."""
    from vllm_mtpc.proposers.heads.grammar import Grammars

    original = Grammars.start

    def start(self: Grammars, name: str, params: Any) -> None:
        original(self, name, params)
        while (follower := self.followers.get(name)) and follower.asked and follower.asked.grammar is None:
            time.sleep(0.001)

    return engine.replaced(Grammars, "start", start)


def never_compiled() -> Undo:
    from vllm_mtpc.proposers.heads.grammar import Grammars

    return engine.replaced(Grammars, "_compile", lambda self, *args: None)


def together(*injections: Callable[[], Undo]) -> Callable[[], Undo]:
    """These, undone in reverse."""

    def inject() -> Undo:
        undone = [one() for one in injections]
        return lambda: [undo() for undo in reversed(undone)]

    return inject


def unmasked() -> Undo:
    """V1: drafts are drawn and scored as if there were no grammar, and vLLM cuts them at the first forbidden one."""
    from vllm_mtpc.proposers.heads.grammar import Grammars, Masks

    return engine.replaced(Grammars, "masks", lambda self, *args: Masks(None))


def scored_unmasked() -> Undo:
    """V1: drafts are drawn from the masked distribution, and the verifier is told the unmasked one."""
    from vllm_mtpc.proposers.heads.grammar import Masks
    from vllm_mtpc.proposers.v1.proposer import MtpcProposer

    around, propose = Masks.around, MtpcProposer.propose
    running: list[MtpcProposer] = []

    def noting(self: MtpcProposer, *args: Any) -> Any:
        running[:] = [self]
        return propose(self, *args)

    def faulty(self: Masks, pick: Any) -> Any:
        masked = around(self, pick)

        def scored(log_q: Any, k: int) -> Any:
            distribution = log_q.softmax(-1)
            drafts = masked(log_q, k)
            running[0].draft_probs[: len(distribution), k] = distribution
            return drafts

        return scored

    Masks.around, MtpcProposer.propose = faulty, noting

    def undo() -> None:
        Masks.around, MtpcProposer.propose = around, propose

    return undo


def scored_unmasked_v2() -> Undo:
    """V2: drafts are drawn from the masked distribution, and `draft_logits` keep what the launch before has left
    there."""
    from vllm_mtpc.proposers.v2.speculator import MtpcSpeculator

    original = MtpcSpeculator._generate_masked_draft

    def faulty(self: MtpcSpeculator, *args: Any) -> None:
        unmasked = self.draft_logits.clone()
        original(self, *args)
        self.draft_logits.copy_(unmasked)

    return engine.replaced(MtpcSpeculator, "_generate_masked_draft", faulty)


def noted() -> Undo:
    """Notes (drafts, the prefix of them that the grammar allows) of every validation of a structured request."""
    from vllm.v1.structured_output import StructuredOutputManager

    original = StructuredOutputManager.validate_tokens

    def validate_tokens(self: Any, request: Any, spec_tokens: list[int]) -> list[int]:
        valid = original(self, request, spec_tokens)
        if request.use_structured_output:
            engine.RECORDED.append((list(spec_tokens), list(valid)))
        return valid

    return engine.replaced(StructuredOutputManager, "validate_tokens", validate_tokens)


INJECTED = {
    "unmasked drafts": unmasked,
    "masked drafts scored unmasked": together(compiled, scored_unmasked),
    "masked drafts scored unmasked on V2": together(compiled, scored_unmasked_v2),
    "noted drafts": together(compiled, noted),
    "grammars waited for": compiled,
    "grammars never compiled": never_compiled,
}
