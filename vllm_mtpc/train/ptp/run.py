"""Training of PTP heads: what the run is given for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from vllm_mtpc.checkpoint import read_config, resolve_head
from vllm_mtpc.checkpoint.ptp import load_ptp, load_student, save_ptp
from vllm_mtpc.config.ptp import PtpConfig
from vllm_mtpc.errors import UsageError
from vllm_mtpc.eval.ptp_acceptance import measure_ptp
from vllm_mtpc.eval.text import Sampling
from vllm_mtpc.heads.ptp.embedding import check_embedding, default_options
from vllm_mtpc.heads.ptp.student import Student
from vllm_mtpc.train.job import Job
from vllm_mtpc.train.options import TrainOptions
from vllm_mtpc.train.ptp.card import ptp_card
from vllm_mtpc.train.ptp.drafter import PtpDrafter
from vllm_mtpc.train.ptp.losses import OF_VARIANT, loss_name
from vllm_mtpc.train.ptp.source import PrefixSource, default_block_rows, drawing

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_mtpc.data.rows import Rows
    from vllm_mtpc.eval.text import Samples
    from vllm_mtpc.hf import Target

# Shuffled u has to cost an informed head at least this share of its right drafts, or u is hardly used.
SHUFFLE_COST = 0.1
LAW = ("temperature", "top_k", "top_p")  # of the distribution that u picks from
OF_CONFIG = (
    "variant", "window", "informed", "u_embedding", "u_features", "u_hidden", "late_width", "law_trust", "lora_rank",
    "num_speculative_tokens",
)  # fmt: skip


class PtpJob(Job):
    """A PTP head of either variant."""

    own = (
        "variant", "informed", "u_embedding", "u_features", "u_hidden", "late_width", "law_trust", "ptp_loss",
        "proposals", "u_beta", "temperature", "top_k", "top_p",
    )  # fmt: skip
    noun, chosen_by = "PTP heads", "head ptp"
    defaults = {"windows_per_step": 512, "learning_rate": 1e-3}  # noqa: RUF012
    needs_v2 = True

    def __init__(self, options: TrainOptions, target: Target) -> None:
        super().__init__(options, target)
        layers = len(getattr(target.backbone, "layers", ()))  # a target without any is refused by the student
        sizes = {"vocab_size": target.vocab_size, "hidden_size": target.hidden_size}
        sizes["num_hidden_layers"] = max(1, layers)
        self.config = PtpConfig.create(
            target={**target.config.to_dict(), "architectures": target.model.config.architectures, **sizes},
            verifier=self.verifier,
            lora_alpha=float(options.lora_alpha),
            **{name: getattr(options, name) for name in OF_CONFIG},
            **{f"trained_{name}": getattr(options, name) for name in LAW},
        )
        self.student = Student(target, self.config)
        if options.init_from:
            start_from(self.student, options.init_from)
        self.draw = drawing(options.window, options.u_beta)

    @classmethod
    def check(cls, options: TrainOptions) -> None:
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
        if (options.variant, loss) == ("o-ptp", "kl") and options.informed and options.law_trust is None:
            raise ValueError(
                "ptp_loss kl teaches rows distributions, of which an o-ptp head drafts the likeliest token whatever u "
                "is: set law_trust, for example to 0.87, or informed to false for the baseline"
            )
        if options.parallel == "fsdp":
            raise ValueError("parallel=fsdp with head ptp: its adapters are trained with ddp; set parallel: ddp")

    @staticmethod
    def kind(options: TrainOptions) -> str:
        return options.variant

    def drafter(self) -> PtpDrafter:
        return PtpDrafter(self.student, self.options)

    def source(self, rows: Rows) -> PrefixSource:
        return PrefixSource(self.student, rows, self.options)

    def block_rows(self, source: PrefixSource, world: int) -> int:
        return default_block_rows(self.student, self.options.seq_len)

    def described(self) -> dict[str, Any]:
        config = self.config
        names = ("variant", "informed", "window", "u_embedding", "late_width", "law_trust", "lora_rank")
        return {
            **{name: getattr(config, name) for name in names},
            "drafts": config.num_speculative_tokens,
            **{name: getattr(config, f"trained_{name}") for name in LAW},
        }

    def record(self, results: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
        values = super().record(results, run)
        for name in self.options.of_others:
            del values["settings"][name]
        return values

    def save(self, record: dict[str, Any]) -> None:
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
        return results

    def lines(self, results: Mapping[str, Any]) -> list[str]:
        return u_lines(self.options, results)


def start_from(student: Student, name: str) -> None:
    """Take the weights of another PTP head of the same shapes. Raises UsageError where they differ."""
    config = read_config(resolve_head(name))
    if config.speculators_model_type != student.config.speculators_model_type:
        raise UsageError(
            f"init_from={name} is a head of method mtpc; a PTP head starts from a PTP head: name one, or remove it"
        )
    for key in ("variant", "u_embedding", "u_features", "u_hidden", "lora_rank", "lora_alpha", "late_width"):
        ours, theirs = getattr(student.config, key), getattr(config, key)
        is_new = key == "late_width" and not theirs  # a head without a late network is given a new one
        if ours != theirs and not is_new:
            raise UsageError(f"init_from={name} has {key}={theirs}, this run {ours}; set {key} to {theirs}")
    head = load_ptp(resolve_head(name))
    student.take(head.lora, head.embedding, head.late)


def u_lines(options: TrainOptions, results: Mapping[str, Any]) -> list[str]:
    """What shuffling u does to the drafts, and whether that is too little."""
    if "t1" not in results:
        return []
    right, shuffled = results["t1"]["accuracy"], results["t1"]["shuffled_accuracy"]
    lines = [f"drafts that are right: {right:.1%}; with the u of other windows: {shuffled:.1%}"]
    uses_u = options.informed or options.law_trust is not None
    if uses_u and shuffled > (1 - SHUFFLE_COST) * right:
        lines.append(
            "warning: drafts are as good with the u of other windows, so u is not used: train longer, or raise "
            "learning_rate or lora_rank"
        )
    return lines
