"""Conversations as token ids, trained on the assistant's turns only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm_mtpc.errors import UsageError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
        tokenizer.get_chat_template()
    except ValueError:
        raise UsageError(
            "the target's tokenizer has no chat template, which messages need; give text or prompt_ids and "
            "response_ids, or name a target with a chat template"
        ) from None
    if not messages or not is_chat(messages):
        raise UsageError('messages must be a list of {"role": ..., "content": ...} of one message or more')
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    messages = messages[: turns[-1] + 1] if turns else messages
    whole, single, agrees = chat_prompt(messages, tokenizer, prompt=False), [], True
    trained = [False] * len(whole)
    for turn in turns:
        prompt = chat_prompt(messages[:turn], tokenizer)
        tokens = chat_prompt(messages[: turn + 1], tokenizer, prompt=False)
        begin = len(prompt)
        if tokens[:begin] != prompt or len(tokens) == begin:
            raise UsageError(
                f"the chat template renders message {turn + 1}, an assistant's, without its generation prompt "
                "(add_generation_prompt); correct the template, or give prompt_ids and response_ids"
            )
        end = _end_of_turn(tokens, begin, tokenizer)
        single.append((tokens, [begin <= index < end for index in range(len(tokens))]))
        trained[begin:end] = [True] * (end - begin)
        agrees = agrees and whole[: len(tokens)] == tokens
    return [(whole, trained)] if agrees else single


def is_chat(messages: object) -> bool:
    """Return whether these are messages with a role each."""
    return isinstance(messages, list) and all(isinstance(turn, dict) and "role" in turn for turn in messages)


def chat_prompt(
    messages: Sequence[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, origin: str = "", prompt: bool = True
) -> list[int]:
    """Return the token ids of a conversation, with the generation prompt if `prompt`, as serving sends them.

    Raises:
        UsageError: The template refuses the messages; the message starts with `origin`.
    """
    how: dict[str, Any] = {"tokenize": True, "return_dict": True, "add_generation_prompt": prompt}
    try:
        return list(tokenizer.apply_chat_template(list(messages), **how)["input_ids"])
    except Exception as error:  # templates are programs that raise any exception
        raise UsageError(
            f"{origin}the chat template refuses the messages: {first_line(error)}; correct them, or give text or "
            "token ids"
        ) from None


def _end_of_turn(tokens: list[int], begin: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the end of the turn from `begin` on: after the last special token if only white space follows it."""
    ends = {*tokenizer.all_special_ids, *(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)}
    last = next((index for index in reversed(range(begin, len(tokens))) if tokens[index] in ends), None)
    return len(tokens) if last is None or tokenizer.decode(tokens[last + 1 :]).strip() else last + 1
