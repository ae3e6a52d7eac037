"""`vllm-mtpc generate`: one prompt continued on the Hugging Face target, plainly, unverified or as a server does it."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from vllm_mtpc.errors import UsageError
from vllm_mtpc.eval.arguments import add_head, add_sampling, fill_sampling
from vllm_mtpc.flags import check_positive
from vllm_mtpc.report import console

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from vllm_mtpc.eval.decode import Decoded
    from vllm_mtpc.hf import Target

MODES = {
    "stp": "the target alone, a token per forward",
    "mtp": "the head's tokens unverified: fastest, and not the target's text",
    "speculative": "drafts verified by the target: its own text",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_head(parser)
    parser.add_argument("--prompt", required=True, metavar="TEXT")
    explained = "; ".join(f"{name}: {what}" for name, what in MODES.items())
    parser.add_argument("--mode", choices=MODES, default="speculative", help=f"{explained} (default: speculative)")
    parser.add_argument("--temperature", type=float, metavar="T", help="default: 1 (PTP heads: as trained)")
    parser.add_argument("--argmax", action="store_true", help="greedy, as --temperature 0")
    add_sampling(parser)
    parser.add_argument("--num-tokens", type=int, default=200, metavar="N", help="at most (default: 200)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chat", action="store_true", help="put the prompt in the target's chat template")
    parser.add_argument("--ignore-eos", action="store_true", help="do not stop at an end-of-text token")
    parser.add_argument("--quiet", action="store_true", help="print the statistics alone")
    parser.add_argument("--json", action="store_true", help="print text and statistics as JSON")


def run(args: argparse.Namespace) -> int:
    check_positive(args, "num_tokens")
    if args.argmax and args.temperature:
        raise UsageError(f"--argmax with --temperature {args.temperature}: greedy is temperature 0; drop one of them")
    import torch

    from vllm_mtpc.eval.decode import continue_prompt
    from vllm_mtpc.eval.loading import drafts_of, evaluator_of, load, resolve
    from vllm_mtpc.eval.sampling import Sampling
    from vllm_mtpc.eval.text import stop_ids
    from vllm_mtpc.hf import check_length

    args.temperature = [0.0] if args.argmax else None if args.temperature is None else [args.temperature]
    config = resolve(args.head)[1]
    fill_sampling(args, evaluator_of(config), config)
    temperature = Sampling(args.temperature[0], args.top_p, top_k=args.top_k).temperature
    evaluator = load(args.head, args.target, args.dtype, args.device)
    if args.mode != "stp":
        evaluator.check_decoding("generate")
    target, drafts = evaluator.target, drafts_of(config, args.num_drafts)
    prompt = torch.tensor(encode(target, args.prompt, args.chat))
    check_length(target, [prompt], args.num_tokens + drafts, "--num-tokens")
    drafting = evaluator.drafting(evaluator.sampling(temperature, args.top_p, args.top_k), drafts, args.seed)
    stops = set() if args.ignore_eos else stop_ids(target)
    printer = None if args.quiet or args.json else _Printer(target)
    decoded = continue_prompt(args.mode, target, prompt, drafting, args.num_tokens, stops, printer)
    if args.json:
        text = target.tokenizer.decode(decoded.tokens)
        print(json.dumps({"text": text, "tokens": decoded.tokens, **statistics(decoded)}, indent=1))
        return 0
    if printer:
        printer.close()
    _print(f"{args.mode}, T={temperature:g}", decoded, evaluator.step_note if args.mode == "speculative" else None)
    return 0


def encode(target: Target, prompt: str, chat: bool) -> list[int]:
    """Token ids of a prompt. Raises UsageError where the target cannot read text, or has no chat template."""
    if target.tokenizer is None:
        raise UsageError(f"target {target.name} has no tokenizer, so it cannot read --prompt; name one that has")
    if not chat:
        ids = target.tokenizer(prompt).input_ids
    elif not target.tokenizer.chat_template:
        raise UsageError(f"target {target.name} has no chat template; leave --chat out")
    else:
        turn = [{"role": "user", "content": prompt}]
        ids = target.tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
    if not ids:
        raise UsageError("--prompt is empty; give it at least one token")
    return list(ids)


def statistics(decoded: Decoded) -> dict[str, Any]:
    """What is printed and what --json writes; times in seconds, bits under the target at temperature 1."""
    from vllm_mtpc.eval.decode import bits

    return {
        "num_tokens": len(decoded.tokens),
        "steps": decoded.steps,
        "tokens_per_step": decoded.tokens_per_step,
        "acceptance_per_position": decoded.per_position,
        "histogram": decoded.histogram,
        "tokens_per_second": decoded.tokens_per_second,
        "seconds_per_call": decoded.seconds_per_call,
        "prompt_seconds": decoded.prompt_seconds,
        "bits_per_token": bits([decoded]),
    }


class _Printer:
    """Writes text as its tokens come; a character that is not complete yet waits."""

    def __init__(self, target: Target) -> None:
        self.tokenizer, self.tokens, self.printed = target.tokenizer, [], 0

    def __call__(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        text = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
        if not text.endswith("\ufffd"):
            self._write(text)

    def _write(self, text: str) -> None:
        sys.stdout.write(text[self.printed :])
        sys.stdout.flush()
        self.printed = len(text)

    def close(self) -> None:
        self._write(self.tokenizer.decode(self.tokens, skip_special_tokens=True))
        print("\n")


def _print(title: str, decoded: Decoded, note: str | None) -> None:
    from rich.table import Table

    from vllm_mtpc.engine.counters import DEFINITIONS

    found = statistics(decoded)
    table = Table(title=title, title_justify="left", show_header=False)
    rows = [
        ("tokens, steps", f"{found['num_tokens']}, {found['steps']}"),
        ("tokens/step", f"{found['tokens_per_step']:.3f}"),
        ("acceptance per position", " ".join(f"{value:.2f}" for value in found["acceptance_per_position"])),
        ("steps by tokens gained", " ".join(f"{at}:{count}" for at, count in enumerate(found["histogram"]))),
        ("tokens/s", f"{found['tokens_per_second']:.1f}"),
        ("time per call", f"{1000 * found['seconds_per_call']:.1f} ms"),
        ("time to read the prompt", f"{1000 * found['prompt_seconds']:.1f} ms"),
        ("bits per token under the target", f"{found['bits_per_token']:.3f}"),
    ]
    for row in rows:
        if row[1]:
            table.add_row(*row)
    for part in (table, DEFINITIONS, *([note] if note else [])):
        console().print(part, markup=False)
