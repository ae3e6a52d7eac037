"""Prompts of a measurement, as token ids: Spec-Bench, jsonl, text files, or the demo's own.

The demo's are openings of functions in the library text that its models were not trained on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain, zip_longest
from typing import Any

from vllm_mtpc.data.chat import chat_prompt
from vllm_mtpc.errors import UsageError

DEMO_PROMPTS = 512  # there are some 900 openings
_OPENING = re.compile(rb"^ *(?:def|class) ", re.MULTILINE)


def held_out(count: int, length: int = 200) -> list[str]:
    """``count`` snippets of ``length`` ASCII bytes, spread over the held-out documents, always the same ones.

    Each begins at a definition; the first definition of every document is passed over in favour of one in its middle.
    """
    from vllm_mtpc import demo

    snippets: list[list[str]] = []
    for document in demo.held_out(demo.texts()):
        cuts = [document[found.start() : found.start() + length] for found in _OPENING.finditer(document)]
        usable = [cut.decode("ascii") for cut in cuts if len(cut) == length and cut.isascii()]
        middle = len(usable) // 2
        snippets.append(usable[middle:] + usable[:middle])
    mixed = [found for turn in zip_longest(*snippets) for found in turn if found is not None]
    if len(mixed) < count:
        raise ValueError(f"{count} prompts asked for, the held-out text has {len(mixed)} openings of {length} bytes")
    return mixed[:count]


FORMS = '{"turns": [...]} (Spec-Bench), {"messages": [...]}, {"prompt": ...}, {"prompt_ids": [...]} or {"text": ...}'


def load(data: list[str], target: str, count: int, length: int, longest: int) -> list[list[int]]:
    """At most ``count`` prompts, token ids, of ``data``: files and folders as for training, none for the demo's.

    Conversations and Spec-Bench's first turns go through the target's chat template where it has one; text is cut into
    pieces of ``length`` tokens, spread evenly. Prompts of more than ``longest`` tokens are left out. Where there are
    more than ``count``, those taken are spread evenly. Raises UsageError without a tokenizer and where none is left.
    """
    from vllm_mtpc.data.sources import read_records
    from vllm_mtpc.hf.model import target_tokenizer

    tokenizer = target_tokenizer(target)
    if data:
        by_record = (_prompts(*source, tokenizer, count, length) for source in read_records(data, "train"))
        found = list(chain.from_iterable(by_record))
    else:
        found = [tokenizer(text)["input_ids"] for text in held_out(min(count, DEMO_PROMPTS))]
    usable = [prompt for prompt in found if 0 < len(prompt) <= longest]
    if not usable:
        given = ", ".join(data) or "the demo's text"
        raise UsageError(f"{given}: {len(found)} prompts, none of 1 to {longest} tokens; raise --max-prompt-tokens")
    return spread(usable, count)


def spread(items: Sequence[Any], count: int) -> list[Any]:
    """At most ``count`` of the items, at even distances, in order."""
    count = min(count, len(items))
    return [items[index * len(items) // count] for index in range(count)]


def _prompts(origin: str, record: dict[str, Any], tokenizer: Any, count: int, length: int) -> list[list[int]]:
    """Prompts of a record: one, or pieces of a text, which is one piece where it is shorter than two."""
    if isinstance(record.get("prompt_ids"), list):
        return [record["prompt_ids"]]
    if isinstance(messages := record.get("messages"), list):
        return [_of_chat(origin, messages, tokenizer)]
    if turns := record.get("turns") or record.get("prompt"):
        text = turns if isinstance(turns, str) else str(turns[0])
        return [_of_chat(origin, [{"role": "user", "content": text}], tokenizer)]
    if not isinstance(record.get("text"), str):
        raise UsageError(f"{origin}: keys {', '.join(record)}; a line must be one of {FORMS}")
    tokens = tokenizer(record["text"], verbose=False)["input_ids"]
    starts = range(0, len(tokens) - length + 1, length) if len(tokens) >= 2 * length else [0]
    return [tokens[start : start + length] for start in spread(starts, count)]


def _of_chat(origin: str, messages: list[dict[str, Any]], tokenizer: Any) -> list[int]:
    """A conversation up to the turn that is to be written, in the chat template; without one, its last text alone."""
    while messages and messages[-1].get("role") == "assistant":
        messages = messages[:-1]
    if not messages or not isinstance(messages[-1].get("content"), str):
        raise UsageError(f"{origin}: a conversation needs a turn with text before the assistant's; correct it")
    if getattr(tokenizer, "chat_template", None) is None:
        return tokenizer(messages[-1]["content"])["input_ids"]
    return chat_prompt(messages, tokenizer, f"{origin}: ")
