"""Training of PTP heads: what the run is given for them, and their model card."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vllm_mtpc.checkpoint import read_config, resolve_head
from vllm_mtpc.checkpoint.locate import PROVENANCE_FILE
from vllm_mtpc.checkpoint.ptp_head import load_ptp, load_student, save_ptp
from vllm_mtpc.config.ptp import PtpConfig
from vllm_mtpc.engine.provenance import public
from vllm_mtpc.errors import UsageError
from vllm_mtpc.eval.ptp_acceptance import measure_ptp
from vllm_mtpc.eval.text import Sampling
from vllm_mtpc.files import read_json
from vllm_mtpc.heads.ptp.embedding import check_embedding, default_options
from vllm_mtpc.heads.ptp.student import Student
from vllm_mtpc.train.card import Words, card
from vllm_mtpc.train.job import Job
from vllm_mtpc.train.options import TrainOptions
from vllm_mtpc.train.ptp.drafter import OF_VARIANT, PrefixSource, PtpDrafter, drawing, loss_name

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_mtpc.data.rows import Rows
    from vllm_mtpc.eval.text import Samples
    from vllm_mtpc.hf import Target

# Shuffled u has to cost a head that uses u at least this share of its right drafts, or u is hardly used.
SHUFFLE_COST = 0.1
# What a baseline has in common with the head it is compared with, besides its data.
OF_BASELINE = (
    *("target", "window", "lora_rank", "lora_alpha", "max_steps", "epochs", "windows_per_step", "seq_len", "gamma"),
    *("temperature", "top_k", "top_p", "evaluation_sequences", "evaluation_tokens", "evaluation_prompt_tokens"),
)
SAMPLING = ("temperature", "top_k", "top_p")  # of the distribution that u picks from
OF_HEAD = ("variant", "u_embedding", "u_features", "u_hidden", "late_width", "distribution_trust")
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


class PtpJob(Job):
    """A PTP head of either variant."""

    own = (*OF_HEAD, "baseline", "ptp_loss", "proposals", "u_beta", *SAMPLING)
    noun, chosen_by = "PTP heads", "head ptp"
    student_class = Student
    defaults = {"windows_per_step": 512, "learning_rate": 1e-3}  # noqa: RUF012
    needs_v2 = True

    def __init__(self, options: TrainOptions, target: Target) -> None:
        super().__init__(options, target)
        self.student = self.student_class(target, self.config)
        self.baseline = baseline_figures(options) if options.baseline else {}
        if options.init_from:
            start_from(self.student, options.init_from)
        self.draw = drawing(options.window, options.u_beta)

    @classmethod
    def check(cls, options: TrainOptions) -> None:
        if options.baseline and options.variant == "independent":
            raise ValueError("baseline with variant 'independent': it is the baseline itself; remove baseline")
        asked = default_options(options.u_embedding, options.u_hidden or 1)
        given = {"u_features": options.u_features, "u_hidden": options.u_hidden}
        asked |= {key: value for key, value in given.items() if value is not None}
        check_embedding(options.u_embedding, asked.get("u_features"), asked.get("u_hidden"))
        allowed, loss = OF_VARIANT[options.variant], loss_name(options)
        if loss not in allowed:
            raise ValueError(
                f"ptp_loss {options.ptp_loss!r} with variant {options.variant!r}: allowed are {', '.join(allowed)}; "
                "set ptp_loss to one of them"
            )
        if options.parallel == "fsdp":
            raise ValueError("parallel=fsdp with head ptp: its adapters are trained with ddp; set parallel: ddp")

    @staticmethod
    def head_config(options: TrainOptions, target: Any, verifier: str, sizes: dict[str, Any]) -> PtpConfig:
        text = target.get_text_config()
        sizes = {"architectures": target.architectures, "num_hidden_layers": text.num_hidden_layers, **sizes}
        return PtpConfig.create(
            target=text.to_dict() | sizes,
            verifier=verifier,
            lora_alpha=float(options.lora_alpha),
            **{name: getattr(options, name) for name in (*OF_HEAD, "window", "lora_rank", "num_speculative_tokens")},
            **{f"trained_{name}": getattr(options, name) for name in SAMPLING},
        )

    @staticmethod
    def check_start(options: TrainOptions, config: PtpConfig) -> None:
        if options.baseline:
            baseline_figures(options)
        if options.init_from:
            check_start(config, options.init_from)

    @staticmethod
    def kind(options: TrainOptions) -> str:
        return options.variant

    def drafter(self) -> PtpDrafter:
        return PtpDrafter(self.student, self.options)

    def source(self, rows: Rows) -> PrefixSource:
        return PrefixSource(self.student, rows, self.options)

    def numbers_held(self) -> int:
        """Of states, keys and values."""
        row = self.student.prefix(torch.zeros(1, 2, dtype=torch.long))
        return sum(part[0, ..., :1, :].numel() for part in (row.hidden, *row.keys, *row.values))

    def described(self) -> dict[str, Any]:
        config = self.config
        names = ("variant", "window", "u_embedding", "late_width", "distribution_trust", "lora_rank")
        return {
            **{name: getattr(config, name) for name in names},
            "drafts": config.num_speculative_tokens,
            **{name: getattr(config, f"trained_{name}") for name in SAMPLING},
        }

    def save(self, record: dict[str, Any]) -> None:
        for name in self.options.of_others:
            del record["settings"][name]
        config, student, dtype = self.config, self.student, getattr(torch, self.options.dtype)
        if results := record["figures"]:
            config = config.model_copy(update={"accepted": results["t1"]["histogram"]})
        learnt = student.lora(), student.embedding
        save_ptp(self.options.out, config, *learnt, record, ptp_card(record), dtype, student.late)

    def take(self, weights: Mapping[str, Tensor]) -> None:
        self.student.load_state_dict(weights)

    def samplings(self) -> dict[str, Sampling]:
        """At the trained temperature, and greedy."""
        options = self.options
        return {"t1": Sampling(options.temperature, options.top_p, top_k=options.top_k), "t0": Sampling(0.0)}

    def measure(self, samples: dict[str, Samples]) -> dict[str, Any]:
        student, results, ways = load_student(self.options.out, self.target), {}, self.samplings()
        for name, some in samples.items():
            how = {"num_drafts": self.options.window - 1, "seed": self.options.seed}
            results[name] = asdict(measure_ptp(student, some, ways[name], **how))
            if name in self.baseline:
                results[name]["baseline_tokens_per_step"] = self.baseline[name]["tokens_per_step"]
        return results

    def lines(self, results: Mapping[str, Any]) -> list[str]:
        return u_lines(self.options, results)


def baseline_figures(options: TrainOptions) -> dict[str, Any]:
    """What provenance.json says of the trained head `options.baseline`. Raises UsageError for one that is none."""
    folder = Path(resolve_head(options.baseline))
    record = read_json(folder / PROVENANCE_FILE)
    ours = {key: public(value) for key, value in options.model_dump(mode="json").items()}
    theirs = record.get("settings", {})
    if theirs.get("variant") != "independent" or not record.get("figures"):
        raise UsageError(f"baseline={folder}: not a trained and measured head of variant independent; name one")
    for key in (*OF_BASELINE, "data"):
        if ours[key] != theirs.get(key):
            raise UsageError(
                f"baseline={folder} has {key}={theirs.get(key)}, this run {ours[key]}; train both alike, or remove it"
            )
    return record["figures"]


def start_from(student: Student, name: str) -> None:
    """Take the weights of another PTP head of the same shapes. Raises UsageError where they differ."""
    check_start(student.config, name)
    head = load_ptp(resolve_head(name))
    student.take(head.lora, head.embedding, head.late)


def check_start(wanted: PtpConfig, name: str) -> None:
    """Raises UsageError where a head of the config `wanted` cannot start from another one."""
    config = read_config(resolve_head(name))
    if config.speculators_model_type != wanted.speculators_model_type:
        raise UsageError(
            f"init_from={name} is a head of method mtpc; a PTP head starts from a PTP head: name one, or remove it"
        )
    # rows in the same places may be taught another thing; a late network begins with no effect
    may_become = wanted.first_row == config.first_row and config.variant != "late"
    for key in ("variant", "u_embedding", "u_features", "u_hidden", "lora_rank", "lora_alpha", "late_width"):
        ours, theirs = getattr(wanted, key), getattr(config, key)
        # rows that name tokens may start those of another variant; a late network is new then
        may_differ = may_become and key in ("variant", "late_width")
        if ours != theirs and not may_differ:
            raise UsageError(f"init_from={name} has {key}={theirs}, this run {ours}; set {key} to {theirs}")


def u_lines(options: TrainOptions, results: Mapping[str, Any]) -> list[str]:
    """What shuffling u does to the drafts, and whether that is too little."""
    if "t1" not in results:
        return []
    right, shuffled = results["t1"]["accuracy"], results["t1"]["shuffled_accuracy"]
    lines = [f"drafts that are right: {right:.1%}; with the u of other windows: {shuffled:.1%}"]
    if options.variant != "independent" and shuffled > (1 - SHUFFLE_COST) * right:
        lines.append(
            "warning: drafts are as good with the u of other windows, so u is not used: train longer, or raise "
            "learning_rate or lora_rank"
        )
    ours, theirs = (results["t1"].get(f"{key}tokens_per_step") for key in ("", "baseline_"))
    if theirs:
        lines.append(f"{ours / theirs:.3f}x the tokens/step of the independent baseline, {theirs:.3f}")
    return lines


def ptp_card(record: Mapping[str, Any]) -> str:
    """README.md of a PTP head, from its provenance."""
    head, start = record["head"], record["settings"]["init_from"]
    if shuffled := record["figures"].get("t0"):  # greedy rows all carry u = 0.5: there is nothing to shuffle
        shuffled = {**shuffled, "shuffled_accuracy": None, "shuffled_tokens_per_step": None}
        record = {**record, "figures": {**record["figures"], "t0": shuffled}}
    words = Words(
        method="ptp",
        tags=["mtpc", "ptp", "speculative-decoding"],
        title=f"PTP head: {head['variant']}, n={head['window']}, LoRA rank {head['lora_rank']}",
        about=_about(head),
        columns={"t1": f"T={head['temperature']:g}", "t0": "T=0"},
        rows={
            "baseline_tokens_per_step": "Tokens/step of the independent baseline, trained alike",
            "shuffled_tokens_per_step": "Tokens/step with the u of other windows",
            "accuracy": "Drafts that are right",
            "shuffled_accuracy": "With the u of other windows",
        },
        definitions=DEFINITIONS,
        loss=loss_sentence(record["settings"]),
        start=f"the head `{start}`" if start else "adapters of zero effect",
    )
    return card(record, words)


def _about(head: Mapping[str, Any]) -> list[str]:
    how = [f"temperature {head['temperature']:g}"]
    how += [f"top-k {head['top_k']}"] if head["top_k"] else []
    how += [f"top-p {head['top_p']:g}"] if head["top_p"] < 1 else []
    rows = {
        "o-ptp": "Rows carry them, and name the token that they pick.",
        "c-ptp": "Rows carry them, and give the distribution of the next token, from which its own number picks it.",
        "late": f"Not the paper's: rows carry 0.5, behind them a network of width {head['late_width']} drafts token by "
        f"token, and the numbers pick drafts from its distributions, trusted to {head['distribution_trust'] or 0:g}.",
        "independent": "Rows carry 0.5 in their place: it is a baseline that predicts every token alone.",
    }
    return [
        f"A head for parallel token prediction (arXiv 2512.21323) with the target `{head['target']}`: adapters of the "
        f"target (rank {head['lora_rank']}) that act on auxiliary rows alone, and an embedding "
        f"(`{head['u_embedding']}`) of the random numbers that pick the target's tokens. It drafts up to "
        f"{head['drafts']} tokens at once; the target verifies them with the same random numbers, so the output is the "
        f"target's own. Trained for {', '.join(how)}; with other settings fewer drafts are accepted.",
        rows[head["variant"]],
    ]


def loss_sentence(settings: Mapping[str, Any]) -> str:
    """The loss in a sentence, from the options of a run."""
    name = settings["ptp_loss"] or OF_VARIANT[settings["variant"]][0]
    inside = "" if settings["variant"] in ("o-ptp", "c-ptp") else " (not told to the rows)"
    return (
        f"{LOSSES[name]}, on {PROPOSALS[settings['proposals']]}, u at Beta({settings['u_beta']:g}, "
        f"{settings['u_beta']:g}) inside the token's interval{inside}; position k weighted by "
        f"{settings['gamma']:g}^(k-1)."
    )
