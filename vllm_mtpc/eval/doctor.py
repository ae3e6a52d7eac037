"""`vllm-mtpc doctor`: does vLLM accept as many drafts as the head should get, and if not, why.

A head is judged with every draft verified. Beside it stands what `vllm serve HEAD` gives with default options.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_mtpc.errors import SETUP, CheckpointError, UsageError
from vllm_mtpc.eval.command import add_head
from vllm_mtpc.files import read_json
from vllm_mtpc.flags import check_positive
from vllm_mtpc.report import check_file, console, write_json

if TYPE_CHECKING:
    from vllm_mtpc.engine.served import Served
    from vllm_mtpc.eval.evaluator import Asked, Cause, Comparison, Evaluator

MAX_NUM_SEQS = 16
CPU_CACHE_BYTES = 256 << 20
PROMPT_BYTES = 1 << 16  # of data for each prompt, where there is more
ALONE = 8  # prompts that are also asked one after the other, with default options
# Why a draft was not verified -> the option that decides it, and what keeps the draft
OPTIONS = {
    "schedule": ("num_speculative_tokens_per_batch_size", '"off", with "min_survival": 0 on Model Runner V1'),
    "survival": ("min_survival", "0"),
    "budget": ("max_num_batched_tokens", "more than running requests x (1 + drafts)"),
}


@dataclass(frozen=True)
class Diagnosis:
    """``cause`` is None where served and predicted agree; ``notes`` are no errors."""

    comparisons: list[Comparison]
    cause: Cause | None
    verdict: str
    notes: list[str]
    as_served: list[tuple[str, dict[str, Any]]]  # lines, rows of JSON

    @property
    def healthy(self) -> bool:
        return self.cause is None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_head(parser)
    add("--data", nargs="+", metavar="DATA", help="prompts come from it (default: packaged ones)")
    add("--prompts", type=int, default=32, metavar="N", help="default: 32")
    add("--prompt-tokens", type=int, default=64, metavar="P", help="of a prompt of text (default: 64)")
    add("--max-tokens", type=int, default=128, metavar="N", help="of an answer (default: 128)")
    add("--temperature", type=float, nargs="+", metavar="T", help="default: 0 1 (PTP heads: 0, as trained)")
    add("--draft-pass", choices=("two-pass", "merged"), help="PTP heads: how they are served (default: two-pass)")
    add("--seed", type=int, default=0, help="of the choice of prompts and of the engine")
    add("--engine", default="{}", metavar="JSON", help='more of vllm.LLM, as {"tensor_parallel_size": 2}')
    add("--log", type=Path, metavar="FILE", help="keep vLLM's log there")
    add("--json", type=Path, metavar="FILE", help="write the findings there as well")
    add("--record", type=Path, metavar="FILE", help="keep what was served there (.jsonl): data of vllm-mtpc train")


def run(args: argparse.Namespace) -> int:
    from vllm_mtpc.engine import provenance

    diagnosis = diagnose(args)
    _print(diagnosis)
    if args.json:
        report = {
            **provenance.collect(),
            "head": args.head,
            "healthy": diagnosis.healthy,
            "cause": diagnosis.cause.name if diagnosis.cause else None,
            "verdict": diagnosis.verdict,
            "notes": diagnosis.notes,
            "comparisons": [_row(comparison) for comparison in diagnosis.comparisons],
            "as_served": [row for _, row in diagnosis.as_served],
        }
        write_json(args.json, report)
    return 0 if diagnosis.healthy else 1


def diagnose(args: argparse.Namespace, serve_target: str | None = None) -> Diagnosis:
    """Serves, predicts, compares. ``serve_target`` injects a fault: vLLM serves that target instead.

    Raises UsageError where vLLM is missing or fails, and what loading the head or its target raises.
    """
    check_positive(args, "prompts", "prompt_tokens", "max_tokens")
    check_file(args.json)
    check_file(args.log, "--log")
    check_file(args.record, "--record")
    if importlib.util.find_spec("vllm") is None:
        raise UsageError(f"vllm is not installed, and doctor serves with it; type: {SETUP}")
    from vllm_mtpc.eval.evaluator import Asked
    from vllm_mtpc.eval.loading import load, resolve, target_of
    from vllm_mtpc.eval.metrics import check_drafts
    from vllm_mtpc.families import FAMILIES

    folder, config = resolve(args.head)
    family = FAMILIES[config.speculators_model_type].evaluator
    family.check_options(args)
    target = target_of(folder, config, args.target)
    drafts = check_drafts(config.window, args.num_drafts, config.num_speculative_tokens)
    prompts, limit = _prompts(args, target, drafts)
    length = min(limit, max(map(len, prompts)) + args.max_tokens + 4 * (drafts + 1))
    engine = _engine(args, serve_target or target, length)
    every = {
        "method": config.speculators_model_type,
        "model": str(folder),
        "num_speculative_tokens": drafts,
        "num_speculative_tokens_per_batch_size": "off",  # what is expected is expected of K drafts in every step
        **family.serving(args, config, drafts, engine["max_num_seqs"]),
        **engine.get("speculative_config", {}),
    }
    temperature, top_k, top_p = family.default_sampling(config)
    seeds = [args.seed * len(prompts) + number for number in range(len(prompts))] if family.seeded else None
    asked = Asked(prompts, drafts, top_k, top_p, seeds, args.draft_pass)
    temperatures = args.temperature or [0.0, temperature]
    served = _serve(engine | {"speculative_config": every}, asked, temperatures, args, 0, family.refusal)
    if served is None:
        evaluator = load(args.head, args.target, args.dtype, args.device)
        raise UsageError(evaluator.unserved(asked, max(temperatures), args))
    if args.record:
        _record(args.record, asked.prompts, served)
    beside = []
    if family.has_defaults:  # as a user gets it who names nothing but the head (and the drafts that doctor was told)
        given = ("method", "model", *(["num_speculative_tokens"] if args.num_drafts else []))
        default = engine | {"speculative_config": {name: every[name] for name in given}}
        whole = {one.temperature: one for one in served}
        for one in _serve(default, asked, temperatures, args, ALONE, None) or ():  # None: of a refusal alone
            beside.append(_as_served(one, len(prompts), whole[one.temperature]))
    # vLLM has ended: its memory is free for the target. The same dtype, so that only the drafting can differ.
    evaluator = load(args.head, args.target, served[0].dtype, args.device)
    comparisons = [evaluator.compare(asked, one) for one in served]
    look = evaluator.find_cause if any(comparison.differs for comparison in comparisons) else evaluator.knows_nothing
    cause = look(comparisons, drafts)
    notes = [*evaluator.notes(comparisons), *_notes(evaluator, args, comparisons)]
    return Diagnosis(comparisons, cause, _verdict(comparisons, cause), notes, beside)


def _engine(args: argparse.Namespace, target: str, length: int) -> dict[str, Any]:
    """Arguments of vllm.LLM, without the head's."""
    from vllm_mtpc.hf import choose_device

    try:
        more = json.loads(args.engine)
    except ValueError:
        more = None
    if not isinstance(more, dict):
        raise UsageError(f"--engine {args.engine}: not a JSON object; write it as '{{\"tensor_parallel_size\": 2}}'")
    engine = {"model": target, "dtype": args.dtype, "seed": args.seed}
    engine |= {"max_num_seqs": MAX_NUM_SEQS, "max_model_len": length}
    if choose_device(args.device).type == "cpu":
        engine |= {"enforce_eager": True, "kv_cache_memory_bytes": CPU_CACHE_BYTES}
    return engine | more


def _prompts(args: argparse.Namespace, target: str, drafts: int) -> tuple[list[list[int]], int]:
    """Token ids of the prompts, and the most tokens the target can read.

    vLLM cuts drafts short that would reach past the longest length it serves; texts that come within two steps of it
    are refused, so that this is not taken for a fault of the head.
    """
    from vllm_mtpc.data.prompts import held_out
    from vllm_mtpc.data.sources import load_documents
    from vllm_mtpc.eval.loading import prompts
    from vllm_mtpc.hf import check_length
    from vllm_mtpc.hf.model import target_config, target_tokenizer

    config, tokenizer = target_config(target).get_text_config(), target_tokenizer(target)
    if args.data:
        documents = load_documents(args.data, tokenizer, most_bytes=PROMPT_BYTES * args.prompts)
        found = [prompt.tolist() for prompt in prompts(documents, args.prompts, args.prompt_tokens, args.seed)]
    else:
        found = [tokenizer(text).input_ids[: args.prompt_tokens] for text in held_out(args.prompts)]
    check_length(target, config, found, args.max_tokens + 2 * (drafts + 1), "--max-tokens")
    return found, getattr(config, "max_position_embeddings", None) or sys.maxsize


def _serve(
    engine: dict[str, Any],
    asked: Asked,
    temperatures: list[float],
    args: argparse.Namespace,
    alone: int,
    refusal: str | None,
) -> list[Served] | None:
    """The answers; None where the engine's log says ``refusal``. Raises UsageError where the engine fails otherwise."""
    from vllm_mtpc.engine.served import serve
    from vllm_mtpc.errors import EngineFailed

    sampling = {"top_k": asked.top_k, "top_p": asked.top_p}
    with tempfile.TemporaryDirectory() as folder:
        log = args.log or Path(folder) / "vllm.log"
        try:
            how = (engine, asked.prompts, temperatures, args.max_tokens, log)
            return serve(*how, sampling=sampling, seeds=asked.seeds, alone=alone)
        except EngineFailed as error:
            if refusal and refusal in log.read_text(encoding="utf-8", errors="replace"):
                return None
            print(error, file=sys.stderr)
            raise UsageError(
                "vLLM did not serve the head: the end of its log is above; correct what it names"
            ) from None


def _record(file: Path, prompts: Sequence[Sequence[int]], served: list[Served]) -> None:
    """The answers, a line each, as `vllm-mtpc regenerate` writes them."""
    pairs = [pair for one in served for pair in zip(prompts, one.outputs, strict=True)]
    lines = [json.dumps({"prompt_ids": list(prompt), "response_ids": answer}) for prompt, answer in pairs]
    file.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def _verdict(comparisons: list[Comparison], cause: Cause | None) -> str:
    from vllm_mtpc.eval.evaluator import TOLERANCE

    if cause is not None:
        worst = max(comparisons, key=lambda comparison: abs(comparison.difference))
        apart = f"T={worst.sampling.temperature:g}: {worst.difference:+.1%} tokens/step. " if worst.differs else ""
        return f"not healthy ({cause.name}): {apart}{cause.sentence}."
    noisy = [comparison for comparison in comparisons if abs(comparison.difference) > TOLERANCE]
    if noisy:
        return "healthy as far as can be told: the difference is within noise; more --prompts tell more."
    return f"healthy: vLLM accepts what the head should get, within {TOLERANCE:.0%}."


def _notes(evaluator: Evaluator, args: argparse.Namespace, comparisons: list[Comparison]) -> list[str]:
    """What the head's files say otherwise."""
    from vllm_mtpc.eval.evaluator import ERRORS, TOLERANCE

    notes = []
    verifier = evaluator.config.speculators_config.verifier.name_or_path
    if args.target and args.target != verifier:
        notes.append(f"the head names another verifier ({verifier}) than --target {args.target}.")
    for comparison in comparisons:
        temperature = f"{comparison.sampling.temperature:g}"
        value, error = _recorded(evaluator.folder, f"t{temperature}", comparison.recorded)
        got, spread = comparison.served.acceptance.tokens_per_drafted_step, comparison.predicted.standard_error
        noise = max(TOLERANCE * value, ERRORS * (error**2 + spread**2) ** 0.5)
        if value and not comparison.differs and abs(got - value) > noise:
            notes.append(
                f"the head's provenance says {value:.2f} tokens/step at T={temperature}: these prompts are not like "
                "those it was measured on."
            )
    return notes


def _recorded(folder: Path, temperature: str, kind: str) -> tuple[float, float]:
    """Tokens/step among the metrics of a head's provenance, and their standard error; 0 where there are none."""
    try:
        found = read_json(folder / "provenance.json")["figures"][temperature]
        values = found.get(f"{kind}tokens_per_step"), found.get(f"{kind}standard_error")
    except (CheckpointError, AttributeError, KeyError, TypeError):
        values = None, None
    value, error = (number if isinstance(number, (int, float)) else 0.0 for number in values)
    return value, error


def _as_served(default: Served, prompts: int, whole: Served) -> tuple[str, dict[str, Any]]:
    """A line and a row of JSON of answers with default options.

    Those of several requests at once stand beside ``whole``, those with every draft verified.
    """
    counted, at_once = default.acceptance, default.at_once or min(MAX_NUM_SEQS, prompts)
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
    if default.at_once is None:
        tokens, rate = whole.acceptance.tokens_per_step, whole.tokens_per_second
        row["every_draft_verified"] = {"tokens_per_step": tokens, "tokens_per_second": rate}
        line += f" (every draft verified: {tokens:.2f}, {rate:.0f} tok/s)"
    if cut := counted.cut_line():
        line += f"; {cut}"
    return line + (f"; most by {option} ({keep} keeps them)" if option else ""), row


def _row(comparison: Comparison) -> dict[str, Any]:
    counted, predicted, chain = comparison.served.acceptance, comparison.predicted, comparison.chain
    return {
        "temperature": comparison.sampling.temperature,
        "served": {"tokens_per_step": counted.tokens_per_drafted_step, "per_position": list(counted.per_position)},
        "predicted": {"tokens_per_step": predicted.tokens_per_step, "per_position": predicted.per_position},
        "standard_error": comparison.noise,
        "difference": comparison.difference,
        "steps": {"served": counted.drafts, "predicted": predicted.steps},
        "dtype": comparison.served.dtype,
        "text": {
            "tokens": chain.tokens,
            "greedy_tokens_differing": chain.differing,
            "greedy_ties": chain.ties,
            "sampled_surprise_in_standard_errors": chain.surprise,
        },
    }


def _print(diagnosis: Diagnosis) -> None:
    from rich.table import Table

    from vllm_mtpc.engine.counters import CUT_DEFINITION, DEFINITIONS
    from vllm_mtpc.eval.metrics import shown_shares

    title = "every draft verified, served by vLLM and predicted along the same text (steps that drafted)"
    table = Table(title=title, title_justify="left")
    for name in ("T", "", "tokens/step", "steps", "acceptance per position"):
        table.add_column(name, justify="right" if name in ("T", "steps") else "left")
    for comparison in diagnosis.comparisons:
        row = _row(comparison)
        for name in ("served", "predicted"):
            shown = f"{row[name]['tokens_per_step']:.3f}"
            shown += f" ± {row['standard_error']:.3f}" if name == "predicted" else f" ({row['difference']:+.1%})"
            positions = shown_shares(row[name]["per_position"])
            table.add_row(f"{row['temperature']:g}", name, shown, f"{row['steps'][name]:.0f}", positions)
    out = console()
    out.print(table)
    out.print(DEFINITIONS, markup=False)
    if diagnosis.as_served:
        out.print(f"as `vllm serve HEAD` serves it ({CUT_DEFINITION.rstrip('.')}):", markup=False)
    for line, _ in diagnosis.as_served:
        out.print(f"  {line}", markup=False, soft_wrap=True)
    for note in diagnosis.notes:
        out.print(f"note: {note}", markup=False)
    out.print(diagnosis.verdict, markup=False)
