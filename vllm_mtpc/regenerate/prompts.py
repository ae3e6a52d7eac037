"""Prompts for regeneration: conversations up to the answer, or pieces of text."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_mtpc.data.sources import FORMS, chat_prompt, exact_ids, is_chat, read_records
from vllm_mtpc.errors import UsageError
from vllm_mtpc.progress import Bar
from vllm_mtpc.regenerate.options import RegenerateOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, Any]]
Prompt = tuple[tuple[int, ...], Messages | None]  # token ids; the conversation they render
# Asks for texts by token ids, a seed and sampling; is sent their ids and why they ended, None: no room; returns a value
Turns = Generator[tuple[list[int], int, dict[str, Any]], tuple[list[int], str | None], dict[str, Any]]


class Request(NamedTuple):
    """One response to generate. `id` depends only on the prompt's ids, the number of the sample and the seed."""

    id: str
    prompt_ids: list[int]
    messages: Messages | None

    def turns(self) -> Turns:
        """Ask for the response; return the answer. One without `response_ids` had no room."""
        tokens, reason = yield self.prompt_ids, int(self.id[:8], 16), {}
        return {"id": self.id, **({"response_ids": tokens, "finish_reason": reason} if reason else {})}

    def line(self, answer: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
        """Return the line of the output file for an answer."""
        line = {"id": self.id, "prompt_ids": self.prompt_ids, "response_ids": answer["response_ids"]}
        line["finish_reason"] = answer["finish_reason"]
        if self.messages is not None and tokenizer is not None:
            text = tokenizer.decode(answer["response_ids"], skip_special_tokens=True)
            line["messages"] = [*self.messages, {"role": "assistant", "content": text}]
        return line


def collect(options: RegenerateOptions, tokenizer: PreTrainedTokenizerBase | None) -> list[Request]:
    """Return all requests of a run in the order of the data; raises UsageError if there are none in it.

    A repeated prompt gets another sample; at temperature 0, where its text would be the same, it is left out.
    """
    if options.prompts == "self":  # the limit is of the target's own prompts
        options = options.model_copy(update={"limit": None})
        if not options.data:
            return []
    prompts = _sample(list(_prompts(options, tokenizer)), options)
    if not prompts:
        raise UsageError(
            f"{', '.join(options.data)}: no prompts; expected is text of at least one token, or conversations with a "
            "turn before the assistant's; name other data"
        )
    requests: list[Request] = []
    seen: Counter[tuple[int, ...]] = Counter()
    for ids, messages in prompts:
        if options.temperature == 0 and seen[ids]:
            continue
        what = json.dumps([list(ids), seen[ids], options.seed]).encode()
        requests.append(Request(hashlib.sha256(what).hexdigest()[:32], list(ids), messages))
        seen[ids] += 1
    return requests


def _sample(items: list[Any], options: RegenerateOptions) -> list[Any]:
    if options.limit is None or options.limit >= len(items):
        return items
    return [items[index] for index in sorted(random.Random(options.seed).sample(range(len(items)), options.limit))]


def _prompts(options: RegenerateOptions, tokenizer: PreTrainedTokenizerBase | None) -> Iterator[Prompt]:
    cut = _cutter(options, tokenizer)
    records = _sample(list(read_records(options.data, options.split)), options)
    for origin, record in Bar(records, "prompts", unit=" records"):
        if "prompt_ids" in record:
            if ids := exact_ids(record, "prompt_ids"):
                yield tuple(ids), None
        elif tokenizer is None:
            raise UsageError(f"{origin}: needs a tokenizer, and the target has none; give prompt_ids")
        elif "messages" in record:
            if not is_chat(messages := record["messages"]):
                raise UsageError(f"{origin}: messages must be a list of objects with role and content; correct it")
            turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
            before = messages[: turns[-1]] if turns else messages  # the target generates the last turn again
            if before and before[-1]["role"] != "assistant":
                yield tuple(chat_prompt(before, tokenizer, f"{origin}: ")), before
        elif isinstance(record.get("text"), str):
            yield from cut(tokenizer(record["text"], verbose=False)["input_ids"])
        else:
            raise UsageError(f"{origin}: keys {', '.join(record)}; a record must be one of {FORMS}")


def _cutter(
    options: RegenerateOptions, tokenizer: PreTrainedTokenizerBase | None
) -> Callable[[list[int]], Iterator[Prompt]]:
    """Return a function that yields the prompts of a text: its beginning, or crops at positions drawn with the seed.

    Every second crop starts at a line of the text. The tokenizer's begin-of-text token is repeated before the crops of
    a text that has it, unless it is the end-of-text token too. A text shorter than `prompt_tokens` is one prompt.
    """
    length, texts = options.prompt_tokens, count()
    begin, end = (getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id"))

    @cache
    def ends_line(token: int) -> bool:
        return tokenizer is not None and tokenizer.decode([token]).endswith("\n")

    def cut(tokens: list[int]) -> Iterator[Prompt]:
        generator = random.Random(f"{options.seed}:{next(texts)}")
        if tokens and tokens[-1] == end:
            tokens = tokens[:-1]
        last = len(tokens) - length
        if not options.crops or last <= 0:
            if tokens:
                yield tuple(tokens[:length]), None
            return
        lead = [begin] if tokens[0] == begin != end else []
        lines = [place for place in range(1, last + 1) if ends_line(tokens[place - 1])]
        for crop in range(options.crops):
            start = generator.choice(lines) if crop % 2 and lines else generator.randint(0, last)
            yield tuple([*lead, *tokens[start : start + length - len(lead)]] if start else tokens[:length]), None

    return cut
