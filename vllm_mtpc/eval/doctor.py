"""`vllm-mtpc doctor`: compare the acceptance that vLLM counts with the expected one, and name causes of a difference.

The comparison serves the head with every draft verified. Then default serving is timed against plain vLLM; the rows are
kept in the head's folder.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_mtpc.checkpoint.locate import SERVED_FILE
from vllm_mtpc.errors import SETUP, CheckpointError, EngineFailed, UsageError
from vllm_mtpc.eval import speed
from vllm_mtpc.eval.command import add_head
from vllm_mtpc.files import read_json, replacing
from vllm_mtpc.flags import check_positive
from vllm_mtpc.report import check_file, console, write_json

if TYPE_CHECKING:
    from vllm_mtpc.engine.served import Served
    from vllm_mtpc.eval.evaluator import Asked, Cause, Comparison, Evaluator

MAX_NUM_SEQS = 16
CPU_CACHE_BYTES = 256 << 20
PROMPT_BYTES = 1 << 16  # of data read for each prompt


@dataclass(frozen=True)
class Diagnosis:
    """Result of a comparison; ``cause`` is None where served and predicted acceptance agree."""

    comparisons: list[Comparison]
    cause: Cause | None
    verdict: str
    notes: list[str]
    speed: list[dict[str, Any]]  # rows of `speed.measure`; empty where nothing was measured
    worth: str

    @property
    def healthy(self) -> bool:
        return self.verdict.startswith("healthy")


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
    add("--log", type=Path, metavar="FILE", help="write vLLM's log to this file")
    add("--json", type=Path, metavar="FILE", help="write the findings to this file as well")
    add(
        "--record",
        type=Path,
        metavar="FILE",
        help="write the served responses to this file (.jsonl), as data for vllm-mtpc train",
    )


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
            "speed": diagnosis.speed,
            "worth": diagnosis.worth,
        }
        write_json(args.json, report)
    return 0 if diagnosis.cause is None else 1


def diagnose(args: argparse.Namespace, serve_target: str | None = None) -> Diagnosis:
    """Serve, predict and compare. ``serve_target`` injects a fault: vLLM serves that target instead.

    Raises UsageError where vLLM is missing or fails, and MtpcError where the head or its target cannot be loaded.
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
        "num_speculative_tokens_per_batch_size": "off",  # the prediction assumes K drafts in every step
        **family.serving(args, config, drafts, engine["max_num_seqs"]),
        **engine.get("speculative_config", {}),
    }
    temperature, top_k, top_p = family.default_sampling(config)
    seeds = [args.seed * len(prompts) + number for number in range(len(prompts))] if family.seeded else None
    asked = Asked(prompts, drafts, top_k, top_p, seeds, args.draft_pass)
    temperatures = args.temperature or [0.0, temperature]
    served = _serve(engine | {"speculative_config": every}, asked, temperatures, args, family.refusal)
    if served is None:
        evaluator = load(args.head, args.target, args.dtype, args.device)
        raise UsageError(evaluator.unserved(asked, max(temperatures), args))
    if args.record:
        _record(args.record, asked.prompts, served)
    # default serving, with the options of this command
    chosen = {"num_speculative_tokens": args.num_drafts, "draft_pass": args.draft_pass}
    default = {name: every[name] for name in ("method", "model", *(name for name, value in chosen.items() if value))}
    found, notes = _speed(engine, default, prompts, temperatures, args, folder)
    # vLLM has ended, so its memory is free for the target. The dtype is the served one: only drafting can differ.
    evaluator = load(args.head, args.target, served[0].dtype, args.device)
    comparisons = [evaluator.compare(asked, one) for one in served]
    look = (
        evaluator.find_cause if any(comparison.differs for comparison in comparisons) else evaluator.find_untrained_head
    )
    cause = look(comparisons, drafts)
    notes = [*evaluator.notes(comparisons), *_notes(evaluator, args, comparisons), *notes]
    expected = {f"T={one.sampling.temperature:g}": one.predicted.tokens_per_step for one in comparisons}
    return Diagnosis(
        comparisons,
        cause,
        _verdict(comparisons, cause, found or speed.rows_here(folder)),
        notes,
        found,
        speed.worth(expected, folder),
    )


def _speed(
    engine: dict[str, Any],
    default: dict[str, Any],
    prompts: list[list[int]],
    temperatures: list[float],
    args: argparse.Namespace,
    folder: Path,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Time default serving against plain vLLM; return the rows, written to the head's folder, and notes."""
    import psutil

    from vllm_mtpc.engine import provenance

    if os.environ.get("TRITON_INTERPRET") == "1":
        return [], ["speed is not measured where Triton is interpreted."]
    place = Path(engine["model"])
    weights = sum(file.stat().st_size for file in place.glob("*.safetensors")) if place.is_dir() else 0
    together = "kv_cache_memory_bytes" in engine and 0 < 4 * weights < psutil.virtual_memory().total
    settings = [(temperature, clients) for clients in speed.CLIENTS for temperature in temperatures]
    engine = {key: value for key, value in engine.items() if key != "speculative_config"}
    try:
        with tempfile.TemporaryDirectory() as logs:
            rows = speed.measure(engine, default, prompts, settings, args.max_tokens, together, Path(logs))
    except EngineFailed as error:
        return [], [f"speed is not measured: {error.reason}"]
    notes = [] if len(rows) == len(settings) else ["not all numbers of clients were measured in the time allowed."]
    if any(max(row["speedups"]) > 2 * min(row["speedups"]) for row in rows):
        notes.append(
            "rounds of the comparison with plain vLLM differ by more than 2x: another process uses this machine."
        )
    try:
        with replacing(folder / SERVED_FILE) as (file,):
            file.write_text(json.dumps({**provenance.collect(), "rows": rows}, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        notes.append(f"{folder / SERVED_FILE}: not written ({error.strerror}), so inspect does not show it.")
    return rows, notes


def _engine(args: argparse.Namespace, target: str, length: int) -> dict[str, Any]:
    """Return the arguments of vllm.LLM without speculative_config."""
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
    """Return the token ids of the prompts, and the maximum length of the target.

    vLLM drops drafts past the maximum length. Texts within two steps of it are refused, because the missing drafts
    would be reported as a fault of the head.
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
    refusal: str | None,
) -> list[Served] | None:
    """Serve the prompts; None where ``refusal`` is in the engine's log. Raises UsageError for another failure."""
    from vllm_mtpc.engine.served import serve

    sampling = {"top_k": asked.top_k, "top_p": asked.top_p}
    with tempfile.TemporaryDirectory() as folder:
        log = args.log or Path(folder) / "vllm.log"
        try:
            how = (engine, asked.prompts, temperatures, args.max_tokens, log)
            return serve(*how, sampling=sampling, seeds=asked.seeds)
        except EngineFailed as error:
            if refusal and refusal in log.read_text(encoding="utf-8", errors="replace"):
                return None
            print(error, file=sys.stderr)
            raise UsageError(
                "vLLM did not serve the head: the end of its log is above; correct the cause named there"
            ) from None


def _record(file: Path, prompts: Sequence[Sequence[int]], served: list[Served]) -> None:
    """Write the responses, a line each, in the format of `vllm-mtpc regenerate`."""
    pairs = [pair for one in served for pair in zip(prompts, one.outputs, strict=True)]
    lines = [json.dumps({"prompt_ids": list(prompt), "response_ids": answer}) for prompt, answer in pairs]
    file.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def _verdict(comparisons: list[Comparison], cause: Cause | None, rows: list[dict[str, Any]]) -> str:
    from vllm_mtpc.eval.evaluator import TOLERANCE

    if cause is not None:
        worst = max(comparisons, key=lambda comparison: abs(comparison.difference))
        apart = f"T={worst.sampling.temperature:g}: {worst.difference:+.1%} tokens/step. " if worst.differs else ""
        return f"not healthy ({cause.name}): {apart}{cause.sentence}."
    if speed.is_slower(rows):
        return f"served as expected, but slower than plain vLLM: {speed.verdict(rows)}."
    noisy = [comparison for comparison in comparisons if abs(comparison.difference) > TOLERANCE]
    if noisy:
        return "healthy within noise: more --prompts make the comparison sharper."
    return f"healthy: vLLM accepts the expected number of drafts, within {TOLERANCE:.0%}."


def _notes(evaluator: Evaluator, args: argparse.Namespace, comparisons: list[Comparison]) -> list[str]:
    """Return notes about differences from the head's own files."""
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
                f"the head's provenance records {value:.2f} tokens/step at T={temperature}: these prompts differ from "
                "those it was measured on."
            )
    return notes


def _recorded(folder: Path, temperature: str, kind: str) -> tuple[float, float]:
    """Return tokens/step in a head's provenance and their standard error; 0 where they are not recorded."""
    try:
        figures = read_json(folder / "provenance.json")["figures"][temperature]
        return float(figures[f"{kind}tokens_per_step"]), float(figures[f"{kind}standard_error"])
    except (CheckpointError, KeyError, TypeError, ValueError):
        return 0.0, 0.0


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

    from vllm_mtpc.engine.counters import DEFINITIONS
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
    for row in diagnosis.speed:
        line = f"T={row['temperature']:g}, {row['clients']} clients, default: {row['tokens_per_second']:.0f} tok/s"
        line += f" ({row['speedup']:.2f}x plain vLLM's), {row['tokens_per_step']:.2f} tokens/step"
        out.print(f"  {line}", markup=False)
    for note in diagnosis.notes:
        out.print(f"note: {note}", markup=False)
    out.print(diagnosis.worth, markup=False, soft_wrap=True)
    out.print(diagnosis.verdict, markup=False)
