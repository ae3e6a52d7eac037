"""The model card of a PTP head; what all cards have is in `vllm_mtpc.train.card`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_mtpc.train.card import Words, card
from vllm_mtpc.train.ptp.losses import OF_VARIANT

DEFINITIONS = """\
- *Tokens/step* includes the target's own token of every step; plain decoding is 1.0, the most is the window. It is that
  of one target pass per step, with all drafts of a full chain each time.
- *Accepted up to k* is unconditional: the share of steps in which drafts 1 to k are all accepted.
- T=0 is greedy, with u = 0.5 on every row. Contexts are the target's own continuations of held-out prompts.
- *With the u of other windows* is the check that drafts follow u: it has to be clearly lower.
- s.e.: standard error over sequences. They are computed on transformers.
"""
LOSSES = {
    "ce": "cross entropy of the token that u picks",
    "bce": "binary cross entropy of the token that u picks against every other",
    "kl": "KL(target || student) of the next token's distribution",
    "reverse-kl": "KL(student || target) of the next token's distribution",
    "inverse": "likelihood of the text, u inside the student's own intervals (no teacher)",
}
PROPOSALS = {
    "teacher": "the target's own text",
    "dataset": "any text",
    "student": "continuations that the student picked",
}


def ptp_card(record: Mapping[str, Any]) -> str:
    """README.md of a PTP head, from its provenance."""
    head, start = record["head"], record["settings"]["init_from"]
    what = ", independent baseline" if is_baseline(head) else ""
    if shuffled := record["figures"].get("t0"):  # greedy rows all carry u = 0.5: there is nothing to shuffle
        shuffled = {**shuffled, "shuffled_accuracy": None}
        record = {**record, "figures": {**record["figures"], "t0": shuffled}}
    words = Words(
        method="ptp",
        tags=["mtpc", "ptp", "speculative-decoding"],
        title=f"PTP head: {head['variant']}, n={head['window']}, LoRA rank {head['lora_rank']}{what}",
        about=_about(head),
        columns={"t1": f"T={head['temperature']:g}", "t0": "T=0"},
        rows={"accuracy": "Drafts that are right", "shuffled_accuracy": "With the u of other windows"},
        definitions=DEFINITIONS,
        loss=loss_sentence(record["settings"]),
        start=f"the head `{start}`" if start else "adapters of zero effect",
    )
    return card(record, words)


def is_baseline(head: Mapping[str, Any]) -> bool:
    return not head["informed"] and head["law_trust"] is None


def _about(head: Mapping[str, Any]) -> list[str]:
    how = [f"temperature {head['temperature']:g}"]
    how += [f"top-k {head['top_k']}"] if head["top_k"] else []
    how += [f"top-p {head['top_p']:g}"] if head["top_p"] < 1 else []
    parts = [
        f"A head for parallel token prediction (arXiv 2512.21323) with the target `{head['target']}`: adapters of the "
        f"target (rank {head['lora_rank']}) that act on auxiliary rows alone, and an embedding "
        f"(`{head['u_embedding']}`) of the random numbers that pick the target's tokens. It drafts up to "
        f"{head['drafts']} tokens at once; the target verifies them with the same random numbers, so the output is the "
        f"target's own. Trained for {', '.join(how)}; with other settings fewer drafts are accepted."
    ]
    if head["late_width"]:
        parts.append(
            f"Behind the target's final norm its rows go through a small network of width {head['late_width']}, one "
            "after another, which the paper does not have."
        )
    if head["law_trust"] is not None:
        rows = "" if head["informed"] else "; the rows themselves are not told them"
        trust = f"{head['law_trust']:g}{rows}"
        parts.append(f"The random numbers pick drafts from the distributions that its rows give, trusted to {trust}.")
    if is_baseline(head):
        parts.append("Its rows are not told the random numbers: it is a baseline that predicts every token alone.")
    return parts


def loss_sentence(settings: Mapping[str, Any]) -> str:
    """The loss in a sentence, from the options of a run."""
    name = settings["ptp_loss"] or OF_VARIANT[settings["variant"]][0]
    inside = "" if settings["informed"] else " (not told to the rows)"
    return (
        f"{LOSSES[name]}, on {PROPOSALS[settings['proposals']]}, u at Beta({settings['u_beta']:g}, "
        f"{settings['u_beta']:g}) inside the token's interval{inside}; position k weighted by "
        f"{settings['gamma']:g}^(k-1)."
    )
