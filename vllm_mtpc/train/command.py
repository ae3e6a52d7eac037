"""`vllm-mtpc train`: from text to a head that can be served."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from vllm_mtpc.checkpoint.locate import is_head
from vllm_mtpc.errors import UsageError
from vllm_mtpc.files import read_yaml
from vllm_mtpc.flags import add_flags, typed
from vllm_mtpc.train.options import PARTS, STATE_FOLDER, TrainOptions, parse
from vllm_mtpc.train.state import latest_state

RESPONSE_TOKENS, CROPS = 128, 8  # of a regenerated response; prompts cut from random places of each text
OWN_RESPONSE_TOKENS = 1024  # of a response to the target's own prompt: those without an end are dropped


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, max_help_position=34)
    parser.usage = "%(prog)s --target MODEL --data DATA... --out FOLDER [options]"
    about = "YAML file with the same keys; flags take precedence"
    parser.add_argument("--config", type=Path, metavar="FILE", help=about)
    add_flags(parser, TrainOptions, required=False)
    for part, table in PARTS.items():
        group = parser.add_argument_group(f"Options of --{part}")
        flag: dict[str, Any] = {"type": json_or_text, "metavar": "VALUE", "default": argparse.SUPPRESS}
        for name, about in table.fields().items():
            flag |= {"dest": f"{part}.{name}", "help": about.replace("%", "%%")}
            group.add_argument(f"--{part}.{name.replace('_', '-')}", **flag)


def json_or_text(text: str) -> Any:
    """Return the JSON value of a flag, or its text: a number, true, a list, or a name."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def run(args: argparse.Namespace) -> int:
    options = read_options(args)
    check_earlier_run(options)
    from vllm_mtpc.train.run import train, with_defaults

    options = with_defaults(options)
    target = None
    if options.regenerate and not options.dry_run:
        options, target = with_responses(options)
    train(options, target=target)
    return 0


def check_earlier_run(options: TrainOptions) -> None:
    """Raise UsageError if the run would overwrite the head or the state of another run."""
    out = options.out
    if options.dry_run and is_head(out):
        raise UsageError(
            f"out={out} holds a head, which --dry-run would replace with an untrained one; type another --out"
        )
    if not options.dry_run and not options.resume and latest_state(out / STATE_FOLDER):
        raise UsageError(
            f"out={out} holds the state of another run ({STATE_FOLDER}); type --resume to go on with it, "
            f"or another --out, or delete {out / STATE_FOLDER} to start again"
        )


def read_options(args: argparse.Namespace) -> TrainOptions:
    """Return the options of a command line and its YAML file; raises UsageError."""
    values = (read_yaml(args.config) if args.config else {}) | typed(args, TrainOptions)
    for part in PARTS:
        given = {key.partition(".")[2]: value for key, value in vars(args).items() if key.startswith(f"{part}.")}
        section = values.get(part, {})
        section = {"kind": section} if isinstance(section, str) else section
        if section := section | given if isinstance(section, dict) else section:
            values[part] = section
    needed = ("target", "out") if values.get("prompts") == "self" else ("target", "data", "out")
    if missing := [f"--{name}" for name in needed if name not in values]:
        raise UsageError(
            f"train: {', '.join(missing)} missing; type: vllm-mtpc train --target MODEL --data DATA --out DIR"
        )
    return parse(values, str(args.config or "train"))


def with_responses(options: TrainOptions) -> tuple[TrainOptions, Any]:
    """Let vLLM write the missing responses; return the options with their files as data, and the target.

    The target has the states of the responses; it is None where vLLM does not compute them.
    """
    from vllm_mtpc.hf import choose_device
    from vllm_mtpc.hf.model import target_config
    from vllm_mtpc.regenerate.command import regenerate
    from vllm_mtpc.regenerate.prompts import RegenerateOptions
    from vllm_mtpc.train.run import read_target

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            "regenerate with several processes: vLLM would start in each; type vllm-mtpc regenerate first and train on "
            "the file it writes"
        )
    greedy = round(options.regenerate * options.trainer.greedy_share)
    sampled: dict[str, Any] = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p")}
    ways = {"sampled": (options.regenerate - greedy, sampled), "greedy": (greedy, {"temperature": 0.0})}
    shared = {name: getattr(options, name) for name in ("target", "data", "seed", "split")}
    shared |= {"max_tokens": RESPONSE_TOKENS, "crops": CROPS, "dtype": options.target_dtype, "engine": options.engine}
    is_own = options.prompts == "self"
    if is_own:  # by default at several temperatures, also greedy
        ways = {"self": (options.regenerate, {} if options.trainer.greedy_share else sampled)}
        shared |= {"prompts": "self", "max_tokens": OWN_RESPONSE_TOKENS}
    target: Any = None
    if not options.needs_modules and options.states_of(target_config(options.target)) == "vllm":
        target = read_target(options, choose_device(options.device))
    files = []
    for name, (count, how) in ways.items():
        if count:
            wanted = RegenerateOptions(**shared, **how, out=options.out / "data" / f"{name}.jsonl", limit=count)
            files.append(str(regenerate(wanted, target and target.respond)))
    return options.model_copy(update={"data": files}), target
