"""What an evaluator does: it says what a head on its target should gain, and why it gains something else when served.

`vllm-mtpc eval`, `generate` and `doctor` are each written once and know no family of heads. They ask the evaluator of
the head's family (`vllm_mtpc.families`), which is the head on its target:

- ``eval``: expected tokens/step on text that the target has written, with the rows of the table to print;
- ``generate``: how a step of a decoding loop drafts and verifies (``decode.Drafting``);
- ``doctor``: how the head is to be served, what it should have counted along the very text that vLLM served, and why it
  did not.

An option of a command that only some families have is refused by the others (``check_options``). What stands here is
what a family does that has nothing of its own to say.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from vllm_mtpc.eval import compare
from vllm_mtpc.eval.sampling import Sampling

if TYPE_CHECKING:
    from typing import Self

    import torch

    from vllm_mtpc.engine.served import Served
    from vllm_mtpc.eval.compare import Asked, Cause, Comparison
    from vllm_mtpc.eval.decode import Drafting
    from vllm_mtpc.eval.text import Samples
    from vllm_mtpc.hf import Target


class Evaluator(Protocol):
    """A head on its target."""

    folder: Path
    config: Any  # the family's
    target: Target
    step_note: ClassVar[str | None] = None  # what ``generate`` says of a step
    seeded: ClassVar[bool] = False  # whether served text is compared draft by draft, so that requests need seeds
    has_defaults: ClassVar[bool] = True  # whether doctor shows what serving with default options gives, too
    refusal: ClassVar[str | None] = None  # beginning of the line with which vLLM may refuse the family on a machine

    @classmethod
    def attach(cls, folder: Path, target: Target, head_dtype: torch.dtype = ...) -> Self:
        """The head of a folder on a target that is loaded and has its sizes."""

    @staticmethod
    def check_options(args: Namespace) -> None:
        """Raises UsageError for options of a command that the family does not have."""

    @staticmethod
    def default_sampling(config: Any) -> tuple[float, int, float]:
        """Temperature, top-k and top-p of a command that names none."""
        return 1.0, 0, 1.0

    @staticmethod
    def serving(args: Namespace, config: Any, num_drafts: int, max_num_seqs: int) -> dict[str, Any]:
        """More of `speculative_config`, with which every draft is verified."""

    def sampling(self, temperature: float, top_p: float = 1.0, top_k: int = 0) -> Sampling:
        """How tokens are picked, drafts as the head is served by default."""
        return Sampling(temperature, top_p, top_k=top_k)

    def check_decoding(self, what: str) -> None:
        """Raises UsageError where ``what`` cannot run the head."""

    def drafting(self, sampling: Sampling, num_drafts: int, seed: int) -> Drafting:
        """The head's part of a decoding loop."""

    def evaluate(self, samples: Samples, sampling: Sampling, num_drafts: int, args: Namespace) -> Any:
        """Results of one temperature on text of the target; ``command`` adds what is ``simulated``."""

    def title(self, num_drafts: int) -> str:
        """The head in a line."""

    def rows(self, results: Sequence[Any]) -> list[tuple[str, list[str]]]:
        """Names and values of the results to print, a value for each temperature."""

    def warnings(self, results: Sequence[Any]) -> list[str]:
        """What the results say against the head, a line each."""
        return []

    def compare(self, asked: Asked, served: Served) -> Comparison:
        """What the head should have counted along the served text."""

    def find_cause(self, comparisons: Sequence[Comparison], num_drafts: int) -> Cause:
        """The likeliest cause of a difference; asked where one of the comparisons differs."""
        return (
            compare.other_number_of_drafts(comparisons, num_drafts)
            or compare.other_target(self.target, comparisons)
            or self.wrong_drafting(comparisons, num_drafts)
            or compare.lost_positions(comparisons)
            or self.other_head(comparisons, num_drafts)
        )

    def wrong_drafting(self, comparisons: Sequence[Comparison], num_drafts: int) -> Cause | None:
        """The mistake with which the head does what was served; None where none is near."""

    def other_head(self, comparisons: Sequence[Comparison], num_drafts: int) -> Cause:
        """The cause where nothing else is wrong."""

    def knows_nothing(self, comparisons: Sequence[Comparison], num_drafts: int) -> Cause | None:
        """The cause where the head is served as predicted, but predicted to know nothing of the text."""

    def notes(self, comparisons: Sequence[Comparison]) -> list[str]:
        """More on the comparisons, a line each."""
        return []

    def unserved(self, asked: Asked, temperature: float, args: Namespace) -> str:
        """Prints what can be said without vLLM, which answered with ``refusal``; returns what to type."""
