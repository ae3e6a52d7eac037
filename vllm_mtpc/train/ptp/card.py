"""provenance.json and the model card of a PTP head; what circuits say alike is in `vllm_mtpc.train.card`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_mtpc.checkpoint.card import front_matter
from vllm_mtpc.train.card import code_block, images, provenance, serving_names, training_section
from vllm_mtpc.train.options import CIRCUIT_OPTIONS, PTP_LOSSES

if TYPE_CHECKING:
    from vllm_mtpc.config.ptp import PtpConfig
    from vllm_mtpc.train.options import TrainOptions

DEFINITIONS = """\
- *Tokens/step* includes the target's own token of every step; plain decoding is 1.0, the most is the window. It is that
  of one target pass per step, with all drafts of a full chain each time.
- *Accepted up to k* is unconditional: the share of steps in which drafts 1 to k are all accepted.
- T=0 is greedy, with u = 0.5 on every row. Contexts are the target's own continuations of held-out prompts.
- *With the u of other windows* is the check that drafts follow u: it has to be clearly lower.
- s.e.: standard error over sequences. Figures are computed on transformers.
"""
LOSSES = {
    "ce": "cross entropy of the token that u picks",
    "bce": "binary cross entropy of the token that u picks against every other",
    "kl": "KL(target || student) of the next token's law",
    "reverse-kl": "KL(student || target) of the next token's law",
    "inverse": "likelihood of the text, u inside the student's own intervals (no teacher)",
}
PROPOSALS = {
    "teacher": "the target's own text",
    "dataset": "any text",
    "student": "continuations that the student picked",
}


def ptp_record(
    options: TrainOptions, config: PtpConfig, figures: Mapping[str, Any], run: Mapping[str, Any]
) -> dict[str, Any]:
    """Content of provenance.json, less the package versions; arguments as of `vllm_mtpc.train.card.record`."""
    head = {
        "variant": config.variant,
        "informed": config.informed,
        "window": config.window,
        "drafts": config.num_speculative_tokens,
        "u_embedding": config.u_embedding,
        "late_width": config.late_width,
        "law_trust": config.law_trust,
        "lora_rank": config.lora_rank,
        "temperature": config.trained_temperature,
        "top_k": config.trained_top_k,
        "top_p": config.trained_top_p,
    }
    values = provenance(options, head, config.speculators_config.verifier.name_or_path, figures, run)
    for name in CIRCUIT_OPTIONS:
        values["settings"].pop(name, None)
    return values


def ptp_card(record: Mapping[str, Any]) -> str:
    """README.md of a PTP head, from what `ptp_record` returned: Markdown with a YAML front matter."""
    head, figures, run = record["head"], record["figures"], record["run"]
    name = Path(record["settings"]["out"]).name or "HEAD"
    is_baseline = not head["informed"] and head["law_trust"] is None
    what = ", independent baseline" if is_baseline else ""
    parts = [
        front_matter(["mtpc", "ptp", "speculative-decoding"], head["base_model"]),
        f"# PTP head: {head['variant']}, n={head['window']}, LoRA rank {head['lora_rank']}{what}\n",
        f"A head for parallel token prediction (arXiv 2512.21323) with the target `{head['target']}`: adapters of the "
        f"target (rank {head['lora_rank']}) that act on auxiliary rows alone, and an embedding "
        f"(`{head['u_embedding']}`) of the random numbers that pick the target's tokens. It drafts up to "
        f"{head['drafts']} tokens at once; the target verifies them with the same random numbers, so the output is the "
        f"target's own. {_law(head)}\n",
    ]
    if head["late_width"]:
        parts.append(
            f"Behind the target's final norm its rows go through a small network of width {head['late_width']}, one "
            "after another, which the paper does not have.\n"
        )
    if head["law_trust"] is not None:
        rows = "" if head["informed"] else "; the rows themselves are not told them"
        trust = f"{head['law_trust']:g}{rows}"
        parts.append(f"The random numbers pick drafts from the laws that its rows give, trusted to {trust}.\n")
    if is_baseline:
        parts.append("Its rows are not told the random numbers: it is a baseline that predicts every token alone.\n")
    if not run["steps"]:
        parts.append(
            "**This head is untrained** (written by `--dry-run`, or with no steps): it can be served, the output is "
            "the target's, but drafts come from initial weights and few are accepted. Nothing was measured.\n"
        )
    elif not figures:
        parts.append(f"**Not measured**: type `vllm-mtpc eval {shlex.quote(name)} --data DATA` for its figures.\n")
    else:
        parts += ["## Figures\n", _table(figures, head["temperature"]), DEFINITIONS]
    parts += [*images(record), "## Serve it\n", _serving(head, name)]
    if run["steps"]:
        parts += ["## Training\n", training_section(record, ptp_loss_sentence(record["settings"]), _start(record))]
    else:
        parts += ["## Command\n", code_block(record["command"])]
    return "\n".join(parts)


def ptp_loss_sentence(settings: Mapping[str, Any]) -> str:
    """The loss in a sentence, from the options of a run."""
    name = settings["ptp_loss"] or PTP_LOSSES[settings["variant"]][0]
    inside = "" if settings["informed"] else " (not told to the rows)"
    return (
        f"{LOSSES[name]}, on {PROPOSALS[settings['proposals']]}, u at Beta({settings['u_beta']:g}, "
        f"{settings['u_beta']:g}) inside the token's interval{inside}; position k weighted by "
        f"{settings['gamma']:g}^(k-1)."
    )


def _law(head: Mapping[str, Any]) -> str:
    parts = [f"temperature {head['temperature']:g}"]
    parts += [f"top-k {head['top_k']}"] if head["top_k"] else []
    parts += [f"top-p {head['top_p']:g}"] if head["top_p"] < 1 else []
    return f"Trained for {', '.join(parts)}; with other settings fewer drafts are accepted."


def _table(figures: Mapping[str, Mapping[str, Any]], temperature: float) -> str:
    columns = list(figures.values())
    rows = [["", *(f"T={temperature:g}" if key == "t1" else "T=0" for key in figures)]]
    rows.append(["---"] * (1 + len(columns)))
    totals = [f"**{values['tokens_per_step']:.3f}** (s.e. {values['standard_error']:.3f})" for values in columns]
    rows.append(["Tokens/step", *totals])
    for k in range(max(len(values["per_position"]) for values in columns)):
        rows.append([f"Accepted up to {k + 1}", *(f"{values['per_position'][k]:.3f}" for values in columns)])
    rows.append(["Drafts that are right", *(f"{values['accuracy']:.3f}" for values in columns)])
    shuffled = [values.get("shuffled_accuracy") if key != "t0" else None for key, values in figures.items()]
    rows.append(["With the u of other windows", *("" if value is None else f"{value:.3f}" for value in shuffled)])
    rows.append(["Sequences / contexts", *(f"{values['sequences']} / {values['contexts']}" for values in columns)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def _serving(head: Mapping[str, Any], name: str) -> str:
    options = f'{{"method": "ptp", "model": "{name}"}}'
    target = head["base_model"] or "TARGET"
    return (
        "With `vllm_mtpc` installed beside vLLM:\n\n"
        + code_block(
            f"vllm serve {shlex.quote(name)}\n", f"vllm serve {target} --speculative-config {shlex.quote(options)}"
        )
        + "\nThe first form finds the target by the name in `config.json`"
        + serving_names(head)
    )


def _start(record: Mapping[str, Any]) -> str:
    settings = record["settings"]
    return f"the head `{settings['init_from']}`" if settings["init_from"] else "adapters of zero effect"
