"""`vllm-mtpc generate`: continue one prompt on the Hugging Face target."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from vllm_mtpc.errors import UsageError
from vllm_mtpc.eval.command import add_head, add_sampling
from vllm_mtpc.flags import check_positive
from vllm_mtpc.report import console

if TYPE_CHECKING:
    import argparse

    from vllm_mtpc.hf import Target

MODES = {
    "stp": "the target alone, a token per forward",
    "mtp": "the head's tokens unverified: fastest, and not the target's text",
    "speculative": "drafts verified by the target: its own text",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_head(parser)
    add("--prompt", required=True, metavar="TEXT")
    explained = "; ".join(f"{name}: {what}" for name, what in MODES.items())
    add("--mode", choices=MODES, default="speculative", help=f"{explained} (default: speculative)")
    add("--temperature", type=float, nargs=1, metavar="T", help="default: 1 (PTP heads: as trained)")
    add("--argmax", action="store_true", help="greedy, as --temperature 0")
    add_sampling(parser)
    add("--num-tokens", type=int, default=200, metavar="N", help="at most (default: 200)")
    add("--seed", type=int, default=0)
    add("--chat", action="store_true", help="put the prompt in the target's chat template")
    add("--ignore-eos", action="store_true", help="do not stop at an end-of-text token")
    add("--quiet", action="store_true", help="print the statistics alone")
    add("--json", action="store_true", help="print text and statistics as JSON")


def run(args: argparse.Namespace) -> int:
    check_positive(args, "num_tokens")
    if args.argmax and args.temperature and args.temperature[0]:
        given = args.temperature[0]
        raise UsageError(f"--argmax with --temperature {given}: greedy is temperature 0; drop one of them")
    import torch
    from transformers import TextStreamer

    from vllm_mtpc.eval.decode import decode
    from vllm_mtpc.eval.loading import load, prepare
    from vllm_mtpc.eval.metrics import check_drafts
    from vllm_mtpc.eval.text import stop_ids
    from vllm_mtpc.hf import Session, check_length

    args.temperature = [0.0] if args.argmax else args.temperature
    config, temperature = prepare(args), args.temperature[0]
    evaluator = load(args.head, args.target, args.dtype, args.device)
    if args.mode != "stp":
        evaluator.check_decoding("generate")
    target, drafts = evaluator.target, check_drafts(config.window, args.num_drafts, config.num_speculative_tokens)
    prompt = torch.tensor(encode(target, args.prompt, args.chat))
    check_length(target.name, target.config, [prompt], args.num_tokens + drafts, "--num-tokens")
    drafting = evaluator.drafting(evaluator.sampling(temperature, args.top_p, args.top_k), drafts, args.seed)
    stops = set() if args.ignore_eos else stop_ids(target)
    streamer = None if args.quiet or args.json else TextStreamer(target.tokenizer, skip_special_tokens=True)
    show = (lambda tokens: streamer.put(torch.tensor(tokens))) if streamer else (lambda tokens: None)
    decoded = decode(args.mode, Session(target), prompt, drafting, args.num_tokens, stops, show)
    if args.json:
        assert target.tokenizer is not None  # it has read the prompt
        text = target.tokenizer.decode(decoded.tokens)
        print(json.dumps({"text": text, "tokens": decoded.tokens, **decoded.statistics()}, indent=1))
        return 0
    if streamer:
        streamer.end()
    note = evaluator.step_note if args.mode == "speculative" else None
    _print(f"{args.mode}, T={temperature:g}", decoded.statistics(), note)
    return 0


def encode(target: Target, prompt: str, chat: bool) -> list[int]:
    """Return the token ids of a prompt. Raises UsageError without a tokenizer or a chat template."""
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
        raise UsageError("--prompt is empty; give it a token or more")
    return list(ids)


def _print(title: str, found: dict[str, Any], note: str | None) -> None:
    from rich.table import Table

    from vllm_mtpc.engine.counters import DEFINITIONS

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
