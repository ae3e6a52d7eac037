"""Prompts of a measurement as token ids: Spec-Bench, .jsonl, text files, or held-out functions of the demo's text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from vllm_mtpc import demo
from vllm_mtpc.data.sources import chat_prompt, read_records
from vllm_mtpc.errors import UsageError

DEMO_PROMPTS = 512  # of about 900 definitions
FORMS = '{"turns": [...]} (Spec-Bench), {"messages": [...]}, {"prompt": ...}, {"prompt_ids": [...]} or {"text": ...}'
_OPENING = re.compile(rb"^ *(?:def|class) ", re.MULTILINE)


def held_out(count: int, length: int = 200) -> list[str]:
    """Return ``count`` snippets of ``length`` ASCII bytes that start at a definition of the demo's held-out documents.

    They are always the same, taken in turn from every document, from its middle on.
    """
    snippets: list[list[str]] = []
    for document in demo.held_out(demo.texts()):
        parts = [document[found.start() : found.start() + length] for found in _OPENING.finditer(document)]
        usable = [part.decode("ascii") for part in parts if len(part) == length and part.isascii()]
        middle = len(usable) // 2
        snippets.append(usable[middle:] + usable[:middle])
    mixed = [found for turn in zip_longest(*snippets) for found in turn if found is not None]
    if len(mixed) < count:
        raise ValueError(f"{count} prompts of {length} bytes; the held-out text has {len(mixed)} of them")
    return mixed[:count]


def load(data: list[str], target: str, count: int, length: int, longest: int) -> list[list[int]]:
    """Return at most ``count`` prompts, as token ids, evenly spread over the data (names as for training).

    Without data they are the demo's held-out text. Conversations and Spec-Bench's first turns are rendered by the
    target's chat template if it has one; prompts taken from text have ``length`` tokens; those of more than ``longest``
    tokens are left out. Raises UsageError if the target has no tokenizer, or no prompt is left.
    """
    from vllm_mtpc.hf.model import target_tokenizer

    tokenizer = target_tokenizer(target)
    found = [found for source in read_records(data, "train") for found in _prompts(*source, tokenizer, count, length)]
    if not data:
        found = [tokenizer(text)["input_ids"] for text in held_out(min(count, DEMO_PROMPTS))]
    usable = [prompt for prompt in found if 0 < len(prompt) <= longest]
    if not usable:
        given = ", ".join(data) or "the demo's text"
        raise UsageError(f"{given}: {len(found)} prompts, none of 1 to {longest} tokens; raise --max-prompt-tokens")
    return spread(usable, count)


def spread(items: Sequence[Any], count: int) -> list[Any]:
    """Return at most ``count`` of the items, evenly spaced, in order."""
    count = min(count, len(items))
    return [items[index * len(items) // count] for index in range(count)]


def _prompts(origin: str, record: dict[str, Any], tokenizer: Any, count: int, length: int) -> list[list[int]]:
    """Return the prompt of a record, or at most `count` pieces of `length` tokens of its text."""
    if isinstance(record.get("prompt_ids"), list):
        return [record["prompt_ids"]]
    messages = record.get("messages")
    if messages is None and (turns := record.get("turns") or record.get("prompt")):
        messages = [{"role": "user", "content": turns if isinstance(turns, str) else str(turns[0])}]
    if isinstance(messages, list):
        while messages and messages[-1].get("role") == "assistant":
            messages = messages[:-1]
        if not messages or not isinstance(messages[-1].get("content"), str):
            raise UsageError(f"{origin}: a conversation needs a turn with text before the assistant's; correct it")
        has_template = getattr(tokenizer, "chat_template", None) is not None
        last = messages[-1]["content"]
        return [chat_prompt(messages, tokenizer, f"{origin}: ") if has_template else tokenizer(last)["input_ids"]]
    if not isinstance(record.get("text"), str):
        raise UsageError(f"{origin}: keys {', '.join(record)}; a line must be one of {FORMS}")
    tokens = tokenizer(record["text"], verbose=False)["input_ids"]
    starts = range(0, len(tokens) - length + 1, length) if len(tokens) >= 2 * length else [0]
    return [tokens[start : start + length] for start in spread(starts, count)]
