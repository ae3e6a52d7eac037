"""Conversations: trained are the tokens that the target generates, with the end of each turn."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from benchmarks.demo.byte_target import build_tokenizer
from vllm_mtpc.data.chat import encode_chat
from vllm_mtpc.errors import UsageError

# Each header and end is one special token next to the bytes; "\n" after the end is written by the template alone.
LOOP = "{%- for m in messages %}"
HEADER = "{{ '<|' + m.role + '|>' }}"
END = "{%- endfor %}{%- if add_generation_prompt %}{{ '<|assistant|>' }}{%- endif %}"
PLAIN = LOOP + HEADER + "{{ m.content + '<|end|>\n' }}" + END
# With markers of transformers around the assistant's content, which change nothing.
MARKED = LOOP + HEADER + "{% generation %}{{ m.content }}{% endgeneration %}{{ '<|end|>\n' }}" + END
# Shows reasoning in the last turn only, as templates of reasoning models do.
REASONING = (
    LOOP
    + HEADER
    + "{%- if m.role == 'assistant' and loop.last %}{{ '<think>' + m.content }}{%- else %}{{ m.content }}{%- endif %}"
    + "{{ '<|end|>\n' }}"
    + END
)
# Its generation prompt differs from the start of its replies.
INCONSISTENT = PLAIN.replace("{{ '<|assistant|>' }}", "{{ '<|reply|>' }}")

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "Yes."},
]


def tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    result = build_tokenizer()
    names = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
    result.add_special_tokens(
        {"additional_special_tokens": [AddedToken(n, special=True, normalized=False) for n in names]}
    )
    result.chat_template = template
    return result


def shown(document: tuple[list[int], list[bool]], tok: PreTrainedTokenizerFast) -> str:
    """The text with the trained tokens in [brackets]."""
    text, inside = "", False
    for token, trained in zip(*document, strict=True):
        if trained != inside:
            text += "[" if trained else "]"
        inside = trained
        text += tok.decode([token])
    return text + "]" * inside


EXPECTED = (
    "<|system|>Be brief.<|end|>\n<|user|>2+2?<|end|>\n<|assistant|>[It is 4.<|end|>]\n"
    "<|user|>sure?<|end|>\n<|assistant|>[Yes.<|end|>]\n"
)


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["plain", "markers"])
def test_assistant_turns_are_trained_with_their_end(template: str) -> None:
    tok = tokenizer(template)
    documents = encode_chat(CHAT, tok)
    assert [shown(document, tok) for document in documents] == [EXPECTED]
    tokens = tok.apply_chat_template(CHAT, tokenize=True, return_dict=True)["input_ids"]
    assert documents[0][0] == tokens


def test_prompt_of_a_turn_equals_served_prompt() -> None:
    tok = tokenizer(PLAIN)
    [(tokens, trained)] = encode_chat(CHAT[:3], tok)
    prompt = tok.apply_chat_template(CHAT[:2], tokenize=True, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert tokens[: trained.index(True)] == prompt


def test_messages_after_the_last_assistant_turn_are_dropped() -> None:
    tok = tokenizer(PLAIN)
    assert encode_chat([*CHAT, {"role": "user", "content": "Thanks"}], tok) == encode_chat(CHAT, tok)


def test_without_an_assistant_turn_nothing_is_trained() -> None:
    tok = tokenizer(PLAIN)
    assert shown(encode_chat(CHAT[:2], tok)[0], tok) == "<|system|>Be brief.<|end|>\n<|user|>2+2?<|end|>\n"


def test_special_tokens_inside_a_turn_do_not_end_it() -> None:
    tok = tokenizer(PLAIN)
    chat = [CHAT[1], {"role": "assistant", "content": "a<|user|>b"}]
    assert shown(encode_chat(chat, tok)[0], tok).endswith("<|assistant|>[a<|user|>b<|end|>]\n")
    tok.chat_template = PLAIN.replace("<|end|>", "")  # no end-of-turn token: what follows the last special is text
    assert shown(encode_chat(chat, tok)[0], tok).endswith("<|assistant|>[a<|user|>b\n]")


def test_turns_rendered_differently_become_documents() -> None:
    tok = tokenizer(REASONING)
    first, second = (shown(document, tok) for document in encode_chat(CHAT, tok))
    assert first == (
        "<|system|>Be brief.<|end|>\n<|user|>2+2?<|end|>\n<|assistant|>[<think>It is 4.<|end|>]\n"  # the last one then
    )
    assert second == (
        "<|system|>Be brief.<|end|>\n<|user|>2+2?<|end|>\n<|assistant|>It is 4.<|end|>\n"
        "<|user|>sure?<|end|>\n<|assistant|>[<think>Yes.<|end|>]\n"
    )
    assert len(encode_chat(CHAT[:3], tok)) == 1


def test_template_without_generation_prompt_is_refused() -> None:
    with pytest.raises(UsageError, match=r"message 3, an assistant's, without its generation prompt"):
        encode_chat(CHAT, tokenizer(INCONSISTENT))


def test_missing_template_is_refused() -> None:
    with pytest.raises(UsageError, match=r"has no chat template.*give text or prompt_ids"):
        encode_chat(CHAT, tokenizer(None))


def test_template_error_is_one_line() -> None:
    tok = tokenizer("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UsageError, match="the chat template refuses the messages: roles must alternate"):
        encode_chat(CHAT, tok)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "one message or more"),
        (None, "must be a list"),
        ({"role": "assistant"}, "must be a list"),
        (["hello"], "must be a list"),
        ([{"content": "hello"}], "must be a list"),
        ([{"role": "assistant"}], "refuses the messages"),
    ],
)
def test_bad_messages_are_refused(messages: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        encode_chat(messages, tokenizer(PLAIN))  # type: ignore[arg-type]
