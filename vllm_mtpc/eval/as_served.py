"""What `vllm serve HEAD` gives with every option at its default, and which option takes the most drafts away."""

from __future__ import annotations

from collections.abc import Sequence
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


def compared(default: Sequence[Served], whole: Sequence[Served], at_once: int) -> list[tuple[str, dict[str, Any]]]:
    """Answers with default options, a line and a row of JSON for each.

    Those of ``at_once`` requests stand beside ``whole``, those with every draft verified.
    """
    full = {one.temperature: one for one in whole}
    return [_row(one, at_once, full.get(one.temperature) if one.at_once is None else None) for one in default]


def _row(default: Served, at_once: int, whole: Served | None) -> tuple[str, dict[str, Any]]:
    counted, at_once = default.acceptance, default.at_once or at_once
    shares = counted.cut_shares
    most = max(shares, key=lambda name: shares[name], default=None)
    option, keep = OPTIONS[most] if most is not None and shares[most] >= 0.02 else (None, None)
    row: dict[str, Any] = {
        "temperature": default.temperature,
        "requests_at_once": at_once,
        "tokens_per_step": counted.tokens_per_step,
        "tokens_per_second": default.tokens_per_second,
        "drafts_cut": shares,
        "costliest_option": option,
        "every_draft_verified": None,
    }
    line = (
        f"T={default.temperature:g}, {at_once} at once: {counted.tokens_per_step:.2f} tokens/step over all steps, "
        f"{default.tokens_per_second:.0f} tok/s"
    )
    if whole is not None:
        tokens, rate = whole.acceptance.tokens_per_step, whole.tokens_per_second
        row["every_draft_verified"] = {"tokens_per_step": tokens, "tokens_per_second": rate}
        line += f" (every draft verified: {tokens:.2f}, {rate:.0f} tok/s)"
    if cut := counted.cut_line():
        line += f"; {cut}"
    return line + (f"; most by {option} ({keep} keeps them)" if option else ""), row
