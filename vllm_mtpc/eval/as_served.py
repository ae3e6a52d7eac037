"""What `vllm serve HEAD` gives with every option at its default, and which option takes the most drafts away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_mtpc.engine.served import Served

ALONE = 8  # prompts that are also asked one after the other
# Why a draft was not verified -> the option that decides it, and what keeps the draft
OPTIONS = {
    "schedule": ("num_speculative_tokens_per_batch_size", '"off", with "min_survival": 0 on Model Runner V1'),
    "survival": ("min_survival", "0"),
    "budget": ("max_num_batched_tokens", "more than running requests x (1 + drafts)"),
}


@dataclass(frozen=True)
class AsServed:
    """One temperature and number of clients: with default options, and with every draft verified (None: not served)."""

    at_once: int
    default: Served
    whole: Served | None

    @property
    def costliest(self) -> str | None:
        """The option whose default takes the most drafts away; None where hardly any is cut."""
        shares = self.default.acceptance.cut_shares
        reason = max(shares, key=lambda name: shares[name], default=None)
        return OPTIONS[reason][0] if reason is not None and shares[reason] >= 0.02 else None

    def row(self) -> dict[str, Any]:
        counted = self.default.acceptance
        return {
            "temperature": self.default.temperature,
            "requests_at_once": self.at_once,
            "tokens_per_step": counted.tokens_per_step,
            "tokens_per_second": self.default.tokens_per_second,
            "drafts_cut": counted.cut_shares,
            "costliest_option": self.costliest,
            "every_draft_verified": None
            if self.whole is None
            else {
                "tokens_per_step": self.whole.acceptance.tokens_per_step,
                "tokens_per_second": self.whole.tokens_per_second,
            },
        }

    def line(self) -> str:
        counted = self.default.acceptance
        text = (
            f"T={self.default.temperature:g}, {self.at_once} at once: {counted.tokens_per_step:.2f} tokens/step over "
            f"all steps, {self.default.tokens_per_second:.0f} tok/s"
        )
        if self.whole is not None:
            whole = self.whole.acceptance.tokens_per_step
            text += f" (every draft verified: {whole:.2f}, {self.whole.tokens_per_second:.0f} tok/s)"
        if cut := counted.cut_line():
            text += f"; {cut}"
        if self.costliest:
            keep = next(what for name, what in OPTIONS.values() if name == self.costliest)
            text += f"; most by {self.costliest} ({keep} keeps them)"
        return text


def by_temperature(default: Sequence[Served], whole: Sequence[Served], at_once: int) -> list[AsServed]:
    """Default answers, of at_once requests and of single ones, beside those with every draft verified."""
    full = {one.temperature: one for one in whole}
    return [
        AsServed(one.at_once or at_once, one, full.get(one.temperature) if one.at_once is None else None)
        for one in default
    ]
