"""`vllm-mtpc regenerate`: prompts from data, responses by the target itself.

A head drafts the target's own output, so that is what it should learn from. vLLM writes the responses in a process of
its own, so that its memory is free again when the head is trained.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Generator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from vllm_mtpc.batch.options import RegenerateOptions
from vllm_mtpc.errors import EngineFailed, UsageError, one_line
from vllm_mtpc.flags import add_flags, typed

if TYPE_CHECKING:
    import argparse

    from vllm_mtpc.batch.output import Responses
    from vllm_mtpc.batch.prompts import Request


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, RegenerateOptions)


def run(args: argparse.Namespace) -> int:
    print(f"responses: {regenerate(parse(typed(args, RegenerateOptions)))}")
    return 0


def parse(values: dict[str, Any]) -> RegenerateOptions:
    """Validated options; raises UsageError, one line."""
    try:
        return RegenerateOptions.model_validate(values)
    except ValidationError as error:
        raise UsageError(f"regenerate: {one_line(error, RegenerateOptions)}") from None


def regenerate(options: RegenerateOptions) -> Path:
    """Writes the responses that `options.out` does not hold yet and returns its path.

    One JSON object per line: `id`, `prompt_ids`, `response_ids` (the token that ended it included), `finish_reason`
    (stop or length), and for conversations `messages` with the new turn. `OUT.meta.json` beside it says how they were
    made; a file made with other settings is refused. Each response has a seed of its own, made from its id, so that an
    interrupted run, started again, writes what the whole one would have written (as far as the target's own logits do
    not depend on what else is in a batch). Prompts without room for a token are skipped and counted.

    Raises UsageError.
    """
    if find_spec("vllm") is None:
        raise UsageError("responses are written by vllm, which is not installed; type: pip install vllm")
    from vllm_mtpc.batch.output import Responses
    from vllm_mtpc.batch.prompts import collect
    from vllm_mtpc.hf.model import tokenizer_if_any

    tokenizer = tokenizer_if_any(options.target)
    requests = collect(options, tokenizer)
    with Responses(options.out, options.meta(), {request.id for request in requests}) as output:
        left = [request for request in requests if request.id not in output.done]
        skipped = _write(options, left, len(requests), tokenizer, output) if left else 0
    if skipped == len(requests):
        raise UsageError(
            f"all {skipped} prompts are longer than target {options.target} can continue; "
            "give shorter prompts, or a larger --max-model-len"
        )
    if skipped:
        print(f"regenerate: skipped {skipped} of {len(requests)} prompts: no room for a response", file=sys.stderr)
    return options.out


def _write(options: RegenerateOptions, left: list[Request], total: int, tokenizer: Any, output: Responses) -> int:
    """Writes the responses to `left` as they come; returns how many were skipped."""
    from vllm_mtpc.progress import Bar

    by_id = {request.id: request for request in left}
    skipped = written = 0
    started = time.monotonic()
    with (
        Bar(total=total, initial=total - len(left), desc="responses", unit="response") as bar,
        closing(_engine(options, left, tokenizer is not None)) as waves,
    ):
        bar.set_postfix_str("vLLM is starting")
        for answers in waves:
            if not answers:  # the engine is ready: its start is no measure of its speed
                started = time.monotonic()
                bar.unpause()
                bar.set_postfix_str("writing")
                continue
            responses = [answer for answer in answers if "response_ids" in answer]
            output.append([by_id[answer["id"]].line(answer, tokenizer) for answer in responses])
            skipped += len(answers) - len(responses)
            written += sum(len(answer["response_ids"]) for answer in responses)
            bar.set_postfix_str(f"{written / max(time.monotonic() - started, 1e-3):,.0f} tokens/s", refresh=False)
            bar.update(len(answers))
    return skipped


def _engine(
    options: RegenerateOptions, requests: list[Request], has_tokenizer: bool
) -> Generator[list[dict[str, Any]]]:
    """Yields an empty wave when the engine is ready, then its answers wave by wave."""
    from vllm_mtpc.engine.child import started
    from vllm_mtpc.engine.writer import ON_CPU

    log = options.out.with_name(options.out.name + ".log")
    prompts = ({"id": request.id, "prompt_ids": request.prompt_ids} for request in requests)
    engine, sampling = options.arguments(has_tokenizer)
    left = len(requests)
    with started("vllm_mtpc.engine.writer:waves", engine, log, {"sampling": sampling}, prompts, ON_CPU) as child:
        try:
            while left:
                answers = child.answer()
                yield answers
                left -= len(answers)
        except EngineFailed:
            raise UsageError(
                f"vLLM ended with exit code {child.process.returncode} before it had answered {left} of "
                f"{len(requests)} prompts: {_reason(log)}; its log is {log}; what was answered is kept, run again to "
                "continue"
            ) from None
    log.unlink(missing_ok=True)


def _reason(log: Path) -> str:
    """The end of an engine's log from its last error on, else its last line."""
    from vllm_mtpc.engine.process import tail

    lines = [line for line in tail(log, 60).splitlines() if line.strip()]
    errors = [number for number, line in enumerate(lines) if re.search(r"\w(Error|Exception)\b", line)]
    return " ".join(lines[errors[-1] if errors else -1 :])[:500] or "its log is empty"
