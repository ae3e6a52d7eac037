"""`vllm-mtpc doctor`: compare the acceptance that vLLM counts with the expected one, along the served text."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_mtpc.errors import SETUP, EngineFailed, UsageError
from vllm_mtpc.eval.command import add_head
from vllm_mtpc.flags import check_positive, json_object
from vllm_mtpc.report import check_file, print_table, write_json

if TYPE_CHECKING:
    from vllm_mtpc.eval.evaluator import Diagnosis

MAX_NUM_SEQS = 16
PROMPT_BYTES = 1 << 16  # of data read for each prompt


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
    more = 'more of vllm.LLM, as {"tensor_parallel_size": 2}'
    add("--engine", type=json_object, default={}, metavar="JSON", help=more)
    add("--log", type=Path, metavar="FILE", help="write vLLM's log to this file")
    add("--json", type=Path, metavar="FILE", help="write the findings to this file as well")


def run(args: argparse.Namespace) -> int:
    from vllm_mtpc.engine import provenance

    diagnoses = diagnose(args)
    rows, verdict = [_row(diagnosis) for diagnosis in diagnoses], describe_health(diagnoses)
    healthy = all(diagnosis.fault is None for diagnosis in diagnoses)
    _print(rows, verdict)
    if args.json:
        found = {"head": args.head, "healthy": healthy, "verdict": verdict, "comparisons": rows}
        write_json(args.json, {**provenance.collect(), **found})
    return 0 if healthy else 1


def diagnose(args: argparse.Namespace) -> list[Diagnosis]:
    """Serve the head at each temperature, compute the expected acceptance along the served text, and compare."""
    check_positive(args, "prompts", "prompt_tokens", "max_tokens")
    for name in ("json", "log"):
        check_file(getattr(args, name), f"--{name}")
    if importlib.util.find_spec("vllm") is None:
        raise UsageError(f"vllm is not installed, and doctor serves with it; type: {SETUP}")
    from vllm_mtpc.engine.served import serve
    from vllm_mtpc.engine.server import ON_CPU
    from vllm_mtpc.eval.evaluator import Requests, check_drafts, load, resolve, target_of
    from vllm_mtpc.families import FAMILIES
    from vllm_mtpc.hf import choose_device

    folder, config = resolve(args.head)
    family = FAMILIES[config.speculators_model_type].evaluator
    target = target_of(folder, config, args.target)
    drafts = check_drafts(config.window, args.num_drafts, config.num_speculative_tokens)
    prompts, limit = _prompts(args, target, drafts)
    length = min(limit, max(map(len, prompts)) + args.max_tokens + 4 * (drafts + 1))
    engine: dict[str, Any] = {"model": target, "dtype": args.dtype, "seed": args.seed}
    engine |= {"max_num_seqs": MAX_NUM_SEQS, "max_model_len": length}
    engine |= ON_CPU if choose_device(args.device).type == "cpu" else {}
    engine |= args.engine
    engine["speculative_config"] = {
        "method": config.speculators_model_type,
        "model": str(folder),
        "num_speculative_tokens": drafts,
        "num_speculative_tokens_per_batch_size": "off",  # the prediction assumes K drafts in every step
        **family.serving(args, config, drafts, engine["max_num_seqs"]),
        **engine.get("speculative_config", {}),
    }
    temperature, top_k, top_p = family.default_sampling(config)
    seeds = [args.seed * len(prompts) + number for number in range(len(prompts))] if family.seeded else None
    requests = Requests(prompts, drafts, top_k, top_p, seeds, args.draft_pass)
    more: dict[str, Any] = {"sampling": {"top_k": top_k, "top_p": top_p}, "seeds": seeds}
    try:
        served = serve(engine, prompts, args.temperature or [0.0, temperature], args.max_tokens, args.log, **more)
    except EngineFailed as error:
        print(error, file=sys.stderr)
        raise UsageError(
            "vLLM did not serve the head: the end of its log is above; correct the cause named there"
        ) from None
    # vLLM has ended, so its memory is free for the target. The dtype is the served one: only drafting can differ.
    evaluator = load(args.head, args.target, served[0].dtype, args.device, args.engine)
    return [evaluator.compare(requests, found) for found in served]


def describe_health(diagnoses: list[Diagnosis]) -> str:
    from vllm_mtpc.eval.evaluator import ERRORS, TOLERANCE

    faults = [f"at T={found.served.temperature:g} {found.fault}" for found in diagnoses if found.fault]
    if faults:
        verdict = f"not healthy: {', '.join(faults)}"
    elif any(abs(found.difference) > TOLERANCE for found in diagnoses):
        verdict = "healthy within noise: more --prompts make the comparison sharper"
    else:
        verdict = "healthy: vLLM accepts the expected number of drafts"
    numbers = (
        f"T={found.served.temperature:g}: {found.served.acceptance.tokens_per_drafted_step:.3f} tokens/step, "
        f"expected {found.predicted.tokens_per_step:.3f} ± {found.noise:.3f}"
        for found in diagnoses
    )
    return f"{verdict} ({'; '.join(numbers)}; allowed {TOLERANCE:.0%} or {ERRORS:g} standard errors)."


def _prompts(args: argparse.Namespace, target: str, drafts: int) -> tuple[list[list[int]], int]:
    """Return the token ids of the prompts, and the maximum length of the target."""
    from vllm_mtpc.data.prompts import held_out
    from vllm_mtpc.data.sources import load_documents
    from vllm_mtpc.eval.text import prompts
    from vllm_mtpc.hf import check_length
    from vllm_mtpc.hf.model import target_config, target_tokenizer

    config, tokenizer = target_config(target).get_text_config(), target_tokenizer(target)
    if args.data:
        documents = load_documents(args.data, tokenizer, most_bytes=PROMPT_BYTES * args.prompts)
        found = [prompt.tolist() for prompt in prompts(documents, args.prompts, args.prompt_tokens, args.seed)]
    else:
        found = [tokenizer(text).input_ids[: args.prompt_tokens] for text in held_out(args.prompts)]
    # vLLM drops drafts past the maximum length: two steps before it they would be reported as a fault of the head
    check_length(target, config, found, args.max_tokens + 2 * (drafts + 1), "--max-tokens")
    return found, getattr(config, "max_position_embeddings", None) or sys.maxsize


def _row(diagnosis: Diagnosis) -> dict[str, Any]:
    counted, predicted, chain = diagnosis.served.acceptance, diagnosis.predicted, diagnosis.chain
    return {
        "temperature": diagnosis.served.temperature,
        "served": {"tokens_per_step": counted.tokens_per_drafted_step, "per_position": list(counted.per_position)},
        "predicted": {"tokens_per_step": predicted.tokens_per_step, "per_position": predicted.per_position},
        "standard_error": diagnosis.noise,
        "difference": diagnosis.difference,
        "steps": {"served": counted.drafts, "predicted": predicted.steps},
        "dtype": diagnosis.served.dtype,
        "text": {
            "tokens": chain.tokens,
            "tokens_differing": chain.differing,
            "sampled_surprise_in_standard_errors": chain.surprise,
        },
    }


def _print(rows: list[dict[str, Any]], verdict: str) -> None:
    from vllm_mtpc.engine.server import DEFINITIONS
    from vllm_mtpc.eval.evaluator import shown_shares

    title = "every draft verified, served by vLLM and predicted along the same text (steps that drafted)"
    lines = []
    for row in rows:
        spreads = {"served": f"({row['difference']:+.1%})", "predicted": f"± {row['standard_error']:.3f}"}
        for name, spread in spreads.items():
            shown = f"{row[name]['tokens_per_step']:.3f} {spread}"
            positions = shown_shares(row[name]["per_position"])
            lines.append([f"{row['temperature']:g}", name, shown, f"{row['steps'][name]:.0f}", positions])
    print_table(title, ["T", "", "tokens/step", "steps", "acceptance per position"], lines)
    print(DEFINITIONS, verdict, sep="\n")
