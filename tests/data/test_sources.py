"""Every form of data: its tokens and masks, prompts from it, and errors that name the file in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import datasets
import numpy as np
import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from benchmarks.demo.byte_target import build_tokenizer
from vllm_mtpc import demo
from vllm_mtpc.data import sources
from vllm_mtpc.data.prompts import load, spread
from vllm_mtpc.data.sources import Documents, encode_chat, load_documents
from vllm_mtpc.errors import UsageError

EOS = 256
TEMPLATE = (
    "{%- for m in messages %}{{ m.role[0] + ':' + m.content + eos_token }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ 'a:' }}{%- endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    tok = build_tokenizer()
    tok.chat_template = TEMPLATE
    return tok


def ids(documents: Documents) -> list[list[int]]:
    return [tokens.tolist() for tokens, _ in documents]


def texts(documents: Documents) -> list[str]:
    """Documents of bytes, each of which must end with the end of text."""
    assert all(tokens[-1] == EOS for tokens in ids(documents))
    return [bytes(tokens[:-1]).decode() for tokens in ids(documents)]


def lines(path: Path, *records: object) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_text_files_become_one_document_each(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (tmp_path / "one.rst").write_text("héllo\n")
    (tmp_path / "two").write_text("b<|endoftext|>")  # its end is not added again
    documents = load_documents([str(tmp_path / "two"), str(tmp_path / "one.rst")], tokenizer)
    assert texts(documents) == ["b", "héllo\n"]
    assert all(mask.all() and (tokens.dtype, mask.dtype) == (np.int32, bool) for tokens, mask in documents)


def test_folder_and_glob_are_read_in_sorted_order(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("z.txt", "sub/b.md", "b.txt", "a.py", "sub/skipped.png", "skipped.cfg"):
        (tmp_path / name).write_text(name)
    (tmp_path / "__init__.py").touch()  # nothing in it: skipped in a folder
    lines(tmp_path / "m.jsonl", {"text": "one"}, {"text": "two"})
    datasets.Dataset.from_dict({"text": ["three", "four"]}).to_parquet(tmp_path / "sub" / "a.parquet")
    assert texts(load_documents([str(tmp_path / "*.txt")], tokenizer)) == ["b.txt", "z.txt"]
    assert texts(load_documents([str(tmp_path / "sub" / "*.parquet")], tokenizer)) == ["three", "four"]
    (tmp_path / "sub" / "a.parquet").unlink()
    assert texts(load_documents([str(tmp_path)], tokenizer)) == ["a.py", "b.txt", "one", "two", "sub/b.md", "z.txt"]


def test_jsonl_reads_mixed_forms(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "xy"}]
    given = {"id": 7, "prompt_ids": [1, 2], "response_ids": [3, 4, 5], "finish_reason": "stop"}
    more = [{"text": "t"}, {"messages": chat, "text": "nor this"}, given, {**given, "text": "not this"}, {"text": "u"}]
    documents = load_documents([lines(tmp_path / "d.jsonl", *more)], tokenizer)
    assert ids(documents) == [[ord("t"), EOS], [*b"u:q", EOS, *b"a:xy", EOS], *[[1, 2, 3, 4, 5]] * 2, [ord("u"), EOS]]
    untrained = [len(mask) - mask.sum() for _, mask in documents]
    assert untrained == [0, 6, 2, 2, 0] and all(mask[-2:].all() for _, mask in documents)


def test_token_ids_need_no_tokenizer(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    given = lines(tmp_path / "d.jsonl", {"prompt_ids": [1], "response_ids": [2, 300]})
    assert ids(load_documents([given], None)) == [[1, 2, 300]]
    assert ids(load_documents([given], tokenizer, vocab_size=320)) == [[1, 2, 300]]  # more ids than the tokenizer's
    for record in ({"text": "a"}, {"messages": [{"role": "assistant", "content": "a"}]}):
        with pytest.raises(UsageError, match=r"t\.jsonl:1: the target has no tokenizer.*prompt_ids"):
            load_documents([lines(tmp_path / "t.jsonl", record)], None)


# --- a part of the data


def test_most_bytes_spreads_records_over_all_files(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """A tenth of 400 lines in two files, 300 and 100: 30 and 10 of them, from everywhere, one more at most."""
    names = []
    for name, numbers in (("a", range(1000, 1300)), ("b", range(1300, 1400))):
        names.append(lines(tmp_path / f"{name}.jsonl", *({"text": str(number)} for number in numbers)))
    size = sum(Path(name).stat().st_size for name in names)
    found = [int(text) for text in texts(load_documents(names, tokenizer, most_bytes=size // 10))]
    assert 40 <= len(found) <= 41 and 30 <= sum(number < 1300 for number in found) <= 31
    assert max(np.diff([1000, *found, 1400])) <= 11
    assert len(load_documents(names, tokenizer, most_bytes=size)) == 400


def test_few_bytes_truncate_texts_and_skip_files(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    for number in range(100):
        (tmp_path / f"{number:02}.txt").write_text("y" * 9)
    assert texts(load_documents([str(tmp_path)], tokenizer, most_bytes=90)) == ["y" * 9] * 10
    (tmp_path / "long").write_text("x" * 1000)
    assert texts(load_documents([str(tmp_path / "long")], tokenizer, most_bytes=90)) == ["x" * 90]


def test_most_bytes_limits_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = datasets.Dataset.from_dict({"prompt_ids": [[0]] * 100, "response_ids": [[n] for n in range(100)]})
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **more: rows)
    found = load_documents(["name"], None, most_bytes=rows.data.nbytes // 10)
    assert ids(found) == [[0, number] for number in range(0, 100, 10)]


# --- the datasets library


def test_dataset_folder_is_read_by_split(tmp_path: Path, tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "README.md").write_text("a card, not data")
    datasets.Dataset.from_dict({"text": ["one", "two"], "id": [1, 2]}).to_parquet(folder / "train.parquet")
    datasets.Dataset.from_dict({"text": ["three"], "id": [1]}).to_parquet(folder / "validation.parquet")
    assert texts(load_documents([str(folder)], tokenizer)) == ["one", "two"]
    assert texts(load_documents([str(folder)], tokenizer, split="validation")) == ["three"]
    with pytest.raises(UsageError, match="split 'test'"):
        load_documents([str(folder)], tokenizer, split="test")


def test_dataset_name_and_config_are_loaded(tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """NAME:CONFIG and split reach load_dataset; messages are preferred to text."""
    asked = []
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "x"}]
    data = datasets.Dataset.from_dict({"messages": [chat], "text": ["not this"], "other": [1]})

    def load_dataset(*arguments: object, **options: object) -> datasets.Dataset:
        asked.append((arguments, options))
        return data

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    documents = load_documents(["some/chats:small", "some/chats"], tokenizer, split="held_out")
    assert asked == [(("some/chats", c), {"split": "held_out"}) for c in ("small", None)]
    assert [tokens[mask].tolist() for tokens, mask in documents] == [[ord("x"), EOS]] * 2
    data = datasets.Dataset.from_dict({"question": ["?"]})
    with pytest.raises(UsageError, match="some/chats:0: keys question; a record must be one of"):
        load_documents(["some/chats"], tokenizer)


# --- errors


def test_missing_data_is_refused_without_reading(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "hollow").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("none.jsonl", "./none", "none*.cfg", "empty.txt", "hollow"):
        with pytest.raises(UsageError, match=r"no such file or folder with content; name files, or a folder with"):
            sources.size_of([name])


def test_unknown_name_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UsageError, match=r"data no-such-set: neither a file or folder nor a data set"):
        load_documents(["no-such-set"], tokenizer)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.jsonl", b'{"text": "a"}\n{"text": \n', r"d\.jsonl: cannot be read \(JSON parse error.*row 1\)"),
        ("d.jsonl", b'{"txt": "a"}\n', r"d\.jsonl:1: keys txt; a record must be one of"),
        ("d.jsonl", b'{"text": 5}\n', r"d\.jsonl:1: text must be a string"),
        ("d.jsonl", b'{"messages": [{"content": "q"}]}\n', r"d\.jsonl:1: messages must be a list of"),
        ("d.jsonl", b'{"messages": [{"role": "user", "content": "q"}]}\n', "no document with a token to train on"),
        ("d.jsonl", b'{"prompt_ids": [1], "response_ids": "23"}\n', r"d\.jsonl:1: response_ids must be a list of int"),
        ("d.jsonl", b'{"prompt_ids": [1], "response_ids": [2, 257]}\n', r"d\.jsonl:1: token id 257 is outside .* 257"),
        ("d.jsonl", b'{"prompt_ids": [-1], "response_ids": [2]}\n', r"d\.jsonl:1: token id -1 is outside"),
        ("latin.txt", "née".encode("latin-1"), "latin.txt: cannot be read .*utf-8.*0xe9"),
        ("zero.txt", b"a\0b", "zero.txt: cannot be read .it holds zero bytes"),
    ],
)
def test_bad_file_is_refused(tmp_path: Path, tokenizer, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message) as error:
        load_documents([str(path)], tokenizer)
    assert len(str(error.value).splitlines()) == 1


# --- conversations: trained are the tokens that the target generates, with the end of each turn

# Each header and end is one special token next to the bytes; "\n" after the end is written by the template alone.
LOOP = "{%- for m in messages %}{{ '<|' + m.role + '|>' }}"
END = "{%- endfor %}{%- if add_generation_prompt %}{{ '<|assistant|>' }}{%- endif %}"
PLAIN = LOOP + "{{ m.content + '<|end|>\n' }}" + END
# Shows reasoning in the last turn only, as templates of reasoning models do.
REASONING = (
    LOOP
    + "{%- if m.role == 'assistant' and loop.last %}{{ '<think>' + m.content }}{%- else %}{{ m.content }}{%- endif %}"
    + "{{ '<|end|>\n' }}"
    + END
)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "Yes."},
]
ASKED = "<|system|>Be brief.<|end|>\n<|user|>2+2?<|end|>\n"
SHOWN = ASKED + "<|assistant|>[It is 4.<|end|>]\n<|user|>sure?<|end|>\n<|assistant|>[Yes.<|end|>]\n"
SPECIAL = [CHAT[1], {"role": "assistant", "content": "a<|user|>b"}]


def chat_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
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


@pytest.mark.parametrize(
    ("template", "messages", "documents"),
    [
        (PLAIN, CHAT, [SHOWN]),
        (PLAIN, [*CHAT, {"role": "user", "content": "Thanks"}], [SHOWN]),
        (PLAIN, CHAT[:2], [ASKED]),
        # special tokens inside a turn do not end it; without a token that ends turns, all of the turn is trained
        (PLAIN, SPECIAL, ["<|user|>2+2?<|end|>\n<|assistant|>[a<|user|>b<|end|>]\n"]),
        (PLAIN.replace("<|end|>", ""), SPECIAL, ["<|user|>2+2?\n<|assistant|>[a<|user|>b\n]"]),
        # turns that are rendered differently become documents
        (
            REASONING,
            CHAT,
            [
                ASKED + "<|assistant|>[<think>It is 4.<|end|>]\n",
                SHOWN.replace("[It is 4.<|end|>]", "It is 4.<|end|>").replace("[Yes", "[<think>Yes"),
            ],
        ),
    ],
)
def test_assistant_turns_are_trained_with_their_end(template: str, messages: list, documents: list[str]) -> None:
    tok = chat_tokenizer(template)
    found = encode_chat(messages, tok)
    assert [shown(document, tok) for document in found] == documents
    if messages is CHAT:  # as a server renders it
        rendered = tok.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
        tokens, trained = found[-1]
        assert tokens == rendered
        prompt = tok.apply_chat_template(messages[:-1], tokenize=True, add_generation_prompt=True, return_dict=True)
        assert trained[len(prompt["input_ids"])] and not trained[len(prompt["input_ids"]) - 1]


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        # its generation prompt differs from the start of its replies
        (PLAIN.replace("{{ '<|assistant|>' }}", "{{ '<|reply|>' }}"), CHAT, "message 3, an assistant's, without its g"),
        (None, CHAT, r"has no chat template.*give text, or prompt_ids"),
        ("{{ raise_exception('must alternate') }}", CHAT, "the chat template refuses the messages: must alternate"),
        (PLAIN, [], "one message or more"),
        (PLAIN, [{"role": "assistant"}], "refuses the messages"),
    ],
)
def test_bad_messages_are_refused(template: str | None, messages: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        encode_chat(messages, chat_tokenizer(template))  # type: ignore[arg-type]


TARGET = str(demo.path("target"))


def loaded(data: list[Path] | list[str], count: int = 8, longest: int = 100, target: str = TARGET) -> list[str]:
    """The prompts as text; ids above 255 (begin of text) left out."""
    found = load([str(file) for file in data], target, count, 10, longest)
    return [bytes(token for token in prompt if token < 256).decode() for prompt in found]


def test_prompts_of_every_form_of_a_line(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "first"}, {"role": "assistant", "content": "answer"}]
    records = [
        {"question_id": 81, "category": "writing", "turns": ["Spec-Bench", "second turn"]},
        {"prompt": "a prompt"},
        {"prompt_ids": list(b"as ids")},
        {"messages": talk},
        {"messages": [*talk, {"role": "user", "content": "last"}]},
    ]
    data, plain = [lines(tmp_path / "d.jsonl", *records)], Path(shutil.copytree(TARGET, tmp_path / "plain"))
    assert loaded(data) == ["Spec-Bench\n", "a prompt\n", "as ids", "first\n", "first\nanswer\nlast\n"]  # its template
    (plain / "chat_template.jinja").unlink()
    assert loaded(data, target=str(plain)) == ["Spec-Bench", "a prompt", "as ids", "first", "last"]


def test_text_prompts_are_spread_over_the_text(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("0123456789abcdefghijKLMNOPQRSTuvwxyz....")
    pieces = loaded([tmp_path / "t.txt"], count=2)
    assert len(pieces) == 2 and all(len(piece) >= 9 for piece in pieces)  # one place may be begin of text
    assert pieces[0].startswith("012345678") and "KLMNOP" in pieces[1]
    assert pieces == loaded([tmp_path / "t.txt"], count=2)


def test_prompts_are_thinned_out_evenly(tmp_path: Path) -> None:
    file = lines(tmp_path / "d.jsonl", *({"prompt_ids": [index] * (index + 1)} for index in range(10)))
    assert [len(prompt) for prompt in load([str(file)], TARGET, 3, 10, 6)] == [1, 3, 5]
    assert spread(list("abc"), 9) == list("abc") and spread(list("abcdefgh"), 4) == list("aceg")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "longer than three"}, "none of 1 to 3 tokens"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "needs a turn with text"),
        (None, "no such file"),
    ],
)
def test_data_without_prompts_is_refused(tmp_path: Path, record: dict | None, message: str) -> None:
    if record:
        lines(tmp_path / "d.jsonl", record)
    with pytest.raises(UsageError, match=message):
        loaded([tmp_path / "d.jsonl"], longest=3)
