"""Training of PTP heads."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from vllm_mtpc.checkpoint import read_config, resolve_head
from vllm_mtpc.checkpoint.locate import PROVENANCE_FILE
from vllm_mtpc.checkpoint.ptp_head import load_ptp, save_ptp
from vllm_mtpc.config.ptp_config import PtpConfig
from vllm_mtpc.data.rows import Rows
from vllm_mtpc.engine.provenance import public
from vllm_mtpc.errors import UsageError
from vllm_mtpc.eval.ptp_evaluator import uses_u
from vllm_mtpc.eval.text import Samples
from vllm_mtpc.files import read_json
from vllm_mtpc.heads import default_window
from vllm_mtpc.heads.ptp.layers import PtpHead
from vllm_mtpc.heads.ptp.student import Student
from vllm_mtpc.train.card import head_card, provenance
from vllm_mtpc.train.options import TrainOptions
from vllm_mtpc.train.ptp.ptp_module import PrefixSource, PtpModule, draw_numbers, loss_name
from vllm_mtpc.train.trainer import Trainer

SAMPLING = ("temperature", "top_k", "top_p")  # of the distribution that u selects from
# Options that a baseline and the head compared with it share.
OF_BASELINE = (
    *("target", "data", "window", "lora_rank", "lora_alpha", "max_steps", "epochs", "windows_per_step", "seq_len"),
    *("gamma", "evaluation_sequences", "evaluation_tokens", *SAMPLING),
)
OF_HEAD = ("variant", "u_embedding", "u_features", "late_width", "distribution_trust")


class PtpTrainer(Trainer):
    """Trains a PTP head of any variant."""

    family_options = (*OF_HEAD, "lora_rank", "lora_alpha", "baseline", "ptp_loss", "proposals", "u_beta", *SAMPLING)
    noun, kind_option, chosen_by = "PTP heads", "variant", "head ptp"
    student_class = Student
    defaults = {"windows_per_step": 512, "learning_rate": 1e-3}  # noqa: RUF012
    needs_modules, greedy_share = True, 0.0

    def setup_model(self) -> None:
        options = self.options
        self.student = self.student_class(self.target, self.config)
        self.baseline = baseline_figures(options)
        if options.init_from:
            self.student.take(load_ptp(resolve_head(options.init_from)))
        self.draw = partial(draw_numbers, self.config.window, options.u_beta)
        self.model = PtpModule(self.student, options)

    @classmethod
    def check(cls, options: TrainOptions) -> None:
        if options.baseline and options.variant == "independent":
            raise ValueError("baseline with variant 'independent': it is the baseline itself; remove baseline")
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
        baseline_figures(options)
        if not (name := options.init_from):
            return
        source = read_config(resolve_head(name))
        if source.speculators_model_type != config.speculators_model_type:
            raise UsageError(
                f"init_from={name} is a head of method mtpc; a PTP head starts from a PTP head: name one, or remove it"
            )
        # another variant with the same rows may start from them; a late network starts with no effect
        may_become = config.first_row == source.first_row and source.variant != "late"
        for key in ("variant", "u_embedding", "u_features", "u_hidden", "lora_rank", "lora_alpha", "late_width"):
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
        names = ("variant", "window", "u_embedding", "late_width", "distribution_trust", "lora_rank")
        facts = {name: getattr(self.config, name) for name in names} | {"drafts": self.config.num_speculative_tokens}
        facts |= {name: getattr(self.config, f"trained_{name}") for name in SAMPLING}
        record = provenance(self.options, facts, self.verifier, results, run)
        for name in self.options.of_others:
            del record["settings"][name]
        config = self.config
        if results:
            config = config.model_copy(update={"accepted": results["t1"]["histogram"]})
        head = PtpHead(config, self.student.lora(), self.student.layers)
        save_ptp(self.options.out, head, record, head_card(record, "ptp"), getattr(torch, self.options.dtype))

    def load_trained(self, weights: Mapping[str, Tensor]) -> None:
        self.student.load_state_dict(weights)

    def measure(self, samples: dict[str, Samples]) -> dict[str, Any]:
        results = super().measure(samples)
        for name in results.keys() & self.baseline.keys():
            results[name]["baseline_tokens_per_step"] = self.baseline[name]["tokens_per_step"]
        return results

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
        ours, theirs = (results["t1"].get(f"{key}tokens_per_step") for key in ("", "baseline_"))
        if theirs:
            lines.append(f"{ours / theirs:.3f}x the tokens/step of the independent baseline, {theirs:.3f}")
        return lines


def baseline_figures(options: TrainOptions) -> dict[str, Any]:
    """Return the results of the head `options.baseline`; empty without one.

    Raises:
        UsageError: It is not a measured head of variant independent, or was trained with other options.
    """
    if not options.baseline:
        return {}
    folder = resolve_head(options.baseline)
    record = read_json(folder / PROVENANCE_FILE)
    ours = {key: public(value) for key, value in options.model_dump(mode="json").items()}
    theirs = record.get("settings", {})
    if theirs.get("variant") != "independent" or not record.get("figures"):
        raise UsageError(f"baseline={folder}: not a trained and measured head of variant independent; name one")
    for key in OF_BASELINE:
        if ours[key] != theirs.get(key):
            raise UsageError(
                f"baseline={folder} has {key}={theirs.get(key)}, this run {ours[key]}; train both alike, or remove it"
            )
    return record["figures"]
