"""Conversations as token ids, trained on the assistant's turns only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from vllm_mtpc.errors import UsageError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION = re.compile(r"\{%-?\s*generation\b")  # the template marks the assistant's text
Document = tuple[list[int], list[bool]]  # token ids; which of them are trained


def encode_chat(messages: Sequence[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> list[Document]:
    """Return the documents of a conversation in the target's chat template, usually one.

    Trained are the tokens that the target generates: the assistant's turns, each with the token that ends it. Some
    templates render an earlier turn differently from the last one (they drop its reasoning); then every assistant's
    turn becomes a document with the prompt that serving sends.

    Raises:
        UsageError: There is no template, it refuses the messages, or a turn does not start with the template's
            generation prompt.
    """
    try:
        template = tokenizer.get_chat_template()
    except ValueError:
        raise UsageError(
            "the target's tokenizer has no chat template, which messages need; give text or prompt_ids and "
            "response_ids, or name a target with a chat template"
        ) from None
    if not messages or not is_chat(messages):
        raise UsageError('messages must be a list of {"role": ..., "content": ...} of one message or more')
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    messages = messages[: turns[-1] + 1] if turns else messages
    ends = {*tokenizer.all_special_ids, *(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)}
    marked = bool(GENERATION.search(template)) and tokenizer.is_fast
    if marked:
        rendered = _render(messages, tokenizer, return_assistant_tokens_mask=True)
        documents = [(list(rendered["input_ids"]), [bool(part) for part in rendered["assistant_masks"]])]
    else:
        documents = _by_prefixes(messages, turns, tokenizer)
    return [(tokens, _end_turns(tokens, trained, ends, tokenizer, marked)) for tokens, trained in documents]


def is_chat(messages: object) -> bool:
    """Return whether these are messages with a role each."""
    return isinstance(messages, list) and all(isinstance(turn, dict) and "role" in turn for turn in messages)


def chat_prompt(messages: Sequence[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, origin: str = "") -> list[int]:
    """Return the token ids of a conversation with the generation prompt, as serving sends them.

    Raises:
        UsageError: The template refuses the messages; the message starts with `origin`.
    """
    return list(_render(messages, tokenizer, origin, add_generation_prompt=True)["input_ids"])


def _render(
    messages: Sequence[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, origin: str = "", **options: bool
) -> dict[str, list[int]]:
    try:
        return tokenizer.apply_chat_template(list(messages), tokenize=True, return_dict=True, **options)
    except Exception as error:  # templates are programs that raise any exception
        raise UsageError(
            f"{origin}the chat template refuses the messages: {first_line(error)}; correct them, or give text or "
            "token ids"
        ) from None


def _by_prefixes(
    messages: Sequence[dict[str, Any]], turns: list[int], tokenizer: PreTrainedTokenizerBase
) -> list[Document]:
    """Find the assistant's turns by rendering the conversation up to each of them."""
    whole = list(_render(messages, tokenizer)["input_ids"])
    trained, single, agrees = [False] * len(whole), [], True
    for turn in turns:
        prompt = chat_prompt(messages[:turn], tokenizer)
        upto = list(_render(messages[: turn + 1], tokenizer)["input_ids"])
        if upto[: len(prompt)] != prompt or len(upto) == len(prompt):
            raise UsageError(
                f"the chat template renders message {turn + 1}, an assistant's, without its generation prompt "
                "(add_generation_prompt); put {% generation %} markers in the template, or give prompt_ids and "
                "response_ids"
            )
        single.append((upto, [index >= len(prompt) for index in range(len(upto))]))
        trained[len(prompt) : len(upto)] = [True] * (len(upto) - len(prompt))
        agrees = agrees and whole[: len(upto)] == upto
    return [(whole, trained)] if agrees else single


def _end_turns(
    tokens: list[int], trained: list[bool], ends: set[int], tokenizer: PreTrainedTokenizerBase, marked: bool
) -> list[bool]:
    """Return `trained` with every turn up to the special token that ends it.

    White space after this token is left out. Template markers often end before it; it is then included.
    """
    exact, begin = list(trained), 0
    for wanted, run in groupby(trained):
        stop = begin + len(list(run))
        if wanted:
            last = next((index for index in range(stop - 1, begin - 1, -1) if tokens[index] in ends), None)
            if last is not None and not tokenizer.decode(tokens[last + 1 : stop]).strip():
                exact[last + 1 : stop] = [False] * (stop - last - 1)
            elif marked and stop < len(tokens) and tokens[stop] in ends:
                exact[stop] = True
        begin = stop
    return exact
