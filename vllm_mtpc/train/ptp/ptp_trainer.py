"""Training of PTP heads."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch

from vllm_mtpc.checkpoint import read_config, resolve_head
from vllm_mtpc.checkpoint.ptp_head import load_ptp, save_ptp
from vllm_mtpc.config.ptp_config import PtpConfig
from vllm_mtpc.data.rows import Rows
from vllm_mtpc.errors import UsageError
from vllm_mtpc.eval.ptp_evaluator import uses_u
from vllm_mtpc.heads import default_window
from vllm_mtpc.heads.ptp.layers import PtpHead
from vllm_mtpc.heads.ptp.student import Student
from vllm_mtpc.train.card import head_card, provenance
from vllm_mtpc.train.options import TrainOptions
from vllm_mtpc.train.ptp.ptp_module import PrefixSource, PtpModule, draw_numbers, loss_name
from vllm_mtpc.train.trainer import Trainer

SAMPLING = ("temperature", "top_k", "top_p")  # of the distribution that u selects from
OF_HEAD = ("variant", "u_features", "late_width", "distribution_trust")


class PtpTrainer(Trainer):
    family_options = (*OF_HEAD, "lora_rank", "lora_alpha", "ptp_loss", "proposals", "u_beta", *SAMPLING)
    noun, kind_option, chosen_by = "PTP heads", "variant", "head ptp"
    student_class = Student
    defaults = {"windows_per_step": 512, "learning_rate": 1e-3}  # noqa: RUF012
    needs_modules, greedy_share = True, 0.0

    def setup_model(self) -> None:
        options = self.options
        self.student = self.student_class(self.target, self.config)
        if options.init_from:
            self.student.take(load_ptp(resolve_head(options.init_from)))
        self.draw = partial(draw_numbers, self.config.window, options.u_beta)
        self.model = PtpModule(self.student, options)

    @classmethod
    def check(cls, options: TrainOptions) -> None:
        loss_name(options)
        if options.proposals == "student" and options.changed("u_beta"):
            raise ValueError("u_beta with proposals 'student': its u is uniform; remove u_beta")

    @staticmethod
    def head_config(options: TrainOptions, target: Any, verifier: str, sizes: dict[str, Any]) -> PtpConfig:
        text = target.get_text_config()
        sizes = {"architectures": target.architectures, "num_hidden_layers": text.num_hidden_layers, **sizes}
        return PtpConfig.create(
            target=text.to_dict() | sizes,
            verifier=verifier,
            lora_alpha=float(options.lora_alpha),
            window=options.window or default_window(text.vocab_size),
            **{name: getattr(options, name) for name in (*OF_HEAD, "lora_rank", "num_speculative_tokens")},
            **{f"trained_{name}": getattr(options, name) for name in SAMPLING},
        )

    @staticmethod
    def check_start(options: TrainOptions, config: PtpConfig) -> None:
        if not (name := options.init_from):
            return
        source = read_config(resolve_head(name))
        if source.speculators_model_type != config.speculators_model_type:
            raise UsageError(
                f"init_from={name} is a head of method mtpc; a PTP head starts from a PTP head: name one, or remove it"
            )
        # another variant with the same rows may start from them; a late network starts with no effect
        may_become = config.first_row == source.first_row and source.variant != "late"
        for key in ("variant", "u_features", "lora_rank", "lora_alpha", "late_width"):
            ours, theirs = getattr(config, key), getattr(source, key)
            if ours != theirs and not (may_become and key in ("variant", "late_width")):
                raise UsageError(f"init_from={name} has {key}={theirs}, this run {ours}; set {key} to {theirs}")

    def source(self, rows: Rows) -> PrefixSource:
        return PrefixSource(self.student, rows, self.options)

    def state_size(self) -> int:
        """Return the numbers of states, keys and values per token."""
        row = self.student.prefix(torch.zeros(1, 2, dtype=torch.long))
        return sum(part[0, ..., :1, :].numel() for part in (row.hidden, *chain.from_iterable(row.layers)))

    def save(self, results: Mapping[str, Any], run: Mapping[str, Any]) -> None:
        names = ("variant", "window", "u_features", "late_width", "distribution_trust", "lora_rank")
        facts = {name: getattr(self.config, name) for name in names} | {"drafts": self.config.num_speculative_tokens}
        facts |= {name: getattr(self.config, f"trained_{name}") for name in SAMPLING}
        record = provenance(self.options, facts, self.verifier, results, run)
        for name in self.options.of_others:
            del record["settings"][name]
        config = self.config.model_copy(update={"accepted": results["t1"]["histogram"]} if results else {})
        head = PtpHead(config, self.student.lora(), self.student.layers)
        save_ptp(self.options.out, head, record, head_card(record, "ptp"), getattr(torch, self.options.dtype))

    def comments(self, results: Mapping[str, Any]) -> list[str]:
        """Report the effect of shuffled u on the drafts; warn if it is small."""
        if "t1" not in results:
            return []
        right, shuffled = results["t1"]["accuracy"], results["t1"]["shuffled_accuracy"]
        lines = [f"correct drafts: {right:.1%}; with the u of other windows: {shuffled:.1%}"]
        if self.options.variant != "independent" and not uses_u(right, shuffled, results["t1"]["contexts"]):
            lines.append(
                "warning: shuffled u gives as many correct drafts, so u is not used: train longer, or raise "
                "learning_rate or lora_rank"
            )
        return lines
