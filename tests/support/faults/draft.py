"""How tests change and note, inside an engine's process, what drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support import engine


def drafts_of(path: str) -> Callable[[], Callable[[], None]]:
    """Drafts by "kernel" in one launch, in "blocks" of the vocabulary, or by "definition"; notes what is drafted."""

    def inject() -> Callable[[], None]:
        from vllm_mtpc.kernels.draft.kernel import Drafter
        from vllm_mtpc.proposers.v2.speculator import MtpcSpeculator as Owner

        make, draft, prepare = Owner._make_drafter, Owner._generate_draft, Drafter.__init__

        def _make_drafter(self: Any, head: Any) -> Drafter | None:
            made = None if path == "definition" else make(self, head)
            assert made is None or made.one_launch == (path == "kernel")
            return made

        def _generate_draft(self: Any, num_reqs: int, num_drafts: int) -> None:
            draft(self, num_reqs, num_drafts)
            if (self.idx_mapping[:num_reqs] >= 0).all():  # no dummy run
                noted = (self.draft_tokens, self.draft_token_confidence_probs)
                engine.RECORDED.append([part[:num_reqs, :num_drafts].clone() for part in noted])

        def in_blocks(self: Any, *args: Any) -> None:
            prepare(self, *args, one_launch=False)

        Owner._make_drafter, Owner._generate_draft = _make_drafter, _generate_draft
        if path == "blocks":
            Drafter.__init__ = in_blocks

        def undo() -> None:
            Owner._make_drafter, Owner._generate_draft, Drafter.__init__ = make, draft, prepare

        return undo

    return inject


def note_drafts() -> Callable[[], None]:
    """Notes, on Model Runner V1, the drafts of every step and the shapes of states that its lm_head was lent for."""
    from vllm_mtpc.proposers.heads import load
    from vllm_mtpc.proposers.v1.proposer import MtpcProposer as Owner

    propose, lend = Owner.propose, load._lm_head
    shapes: list[tuple[int, ...]] = []

    def _lm_head(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        logits = lend(*args, **kwargs)

        def noting(states: Any) -> Any:
            shapes.append(tuple(states.shape))
            return logits(states)

        return noting

    def noted(self: Any, *args: Any, **kwargs: Any) -> list[list[int]]:
        shapes.clear()
        drafts = propose(self, *args, **kwargs)
        engine.RECORDED.append((drafts, list(shapes)))
        return drafts

    Owner.propose, load._lm_head = noted, _lm_head

    def undo() -> None:
        Owner.propose, load._lm_head = propose, lend

    return undo


def does_not_load() -> Callable[[], None]:
    """The head raises where a worker loads it, on either runner."""
    from vllm_mtpc.proposers.v1 import proposer
    from vllm_mtpc.proposers.v2 import speculator

    original = proposer.load_served_head

    def load_served_head(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("half of the head")

    def undo() -> None:
        proposer.load_served_head = speculator.load_served_head = original

    proposer.load_served_head = speculator.load_served_head = load_served_head
    return undo


def keeps_shapes() -> Callable[[], None]:
    """A head that takes another one's place must have its shapes, as on a GPU."""
    from vllm_mtpc.proposers.v2.speculator import MtpcSpeculator as Owner

    return engine.replaced(Owner, "keeps_shapes", True)


INJECTED = {f"drafts by {path}": drafts_of(path) for path in ("kernel", "blocks", "definition")}
INJECTED["note drafts"] = note_drafts
INJECTED["does_not_load"] = does_not_load
INJECTED["keeps_shapes"] = keeps_shapes
