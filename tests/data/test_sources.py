"""Every form of data: its tokens and masks, and errors that name the file in one line."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import datasets
import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from benchmarks.demo.byte_target import build_tokenizer
from vllm_mtpc import demo
from vllm_mtpc.data import sources
from vllm_mtpc.data.sources import BIN_MAGIC, Documents, load_documents
from vllm_mtpc.errors import UsageError
from vllm_mtpc.eval import doctor

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


def texts(documents: Documents) -> list[str]:
    """Documents of bytes, each of which must end with the end of text."""
    found = [documents[i][0].tolist() for i in range(len(documents))]
    assert all(ids[-1] == EOS for ids in found)
    return [bytes(ids[:-1]).decode() for ids in found]


def lines(path: Path, *records: object) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def bin_file(path: Path, tokens: list[int], header: bool = True) -> str:
    head = np.zeros(256, "<i4")
    head[:3] = [BIN_MAGIC, 1, len(tokens)]
    path.write_bytes(head.tobytes() * header + np.array(tokens, "<u2").tobytes())
    return str(path)


def test_text_files_become_one_document_each(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (tmp_path / "one.rst").write_text("héllo\n")
    (tmp_path / "two").write_text("b")
    documents = load_documents([str(tmp_path / "two"), str(tmp_path / "one.rst")], tokenizer)
    assert texts(documents) == ["b", "héllo\n"]
    assert documents.trained.all()
    assert (documents.tokens.dtype, documents.trained.dtype) == (np.int32, bool)
    assert documents.offsets.tolist() == [0, 2, 10]


def test_end_of_text_is_added_once(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = tmp_path / "a.txt"
    path.write_text("ab<|endoftext|>")
    assert load_documents([str(path)], tokenizer).tokens.tolist() == [97, 98, EOS]
    without = build_tokenizer()
    without.eos_token = None
    path.write_text("ab")
    assert load_documents([str(path)], without).tokens.tolist() == [97, 98]


def test_folder_is_read_in_sorted_order(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("z.txt", "sub/b.md", "a.py", "sub/skipped.png", "skipped.cfg"):
        (tmp_path / name).write_text(name)
    (tmp_path / "__init__.py").touch()  # nothing in it: skipped in a folder
    lines(tmp_path / "m.jsonl", {"text": "one"}, {"text": "two"})
    assert texts(load_documents([str(tmp_path)], tokenizer)) == ["a.py", "one", "two", "sub/b.md", "z.txt"]


def test_glob_reads_matching_files(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    for name in ("b.txt", "a.txt", "c.md"):
        (tmp_path / name).write_text(name)
    assert texts(load_documents([str(tmp_path / "*.txt")], tokenizer)) == ["a.txt", "b.txt"]


def test_jsonl_reads_mixed_forms(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "xy"}]
    ids = {"id": 7, "prompt_ids": [1, 2], "response_ids": [3, 4, 5], "finish_reason": "stop"}
    path = lines(tmp_path / "d.jsonl", {"text": "t"}, {"messages": chat}, ids, {**ids, "text": "not this"})
    documents = load_documents([path], tokenizer)
    got = [[(int(t), bool(m)) for t, m in zip(*documents[i], strict=True)] for i in range(len(documents))]
    prompt = [(b, False) for b in b"u:q"] + [(EOS, False)] + [(b, False) for b in b"a:"]
    assert got[0] == [(ord("t"), True), (EOS, True)]
    assert got[1] == [*prompt, (ord("x"), True), (ord("y"), True), (EOS, True)]
    assert got[2] == got[3] == [(1, False), (2, False), (3, True), (4, True), (5, True)]


def test_token_ids_need_no_tokenizer(tmp_path: Path) -> None:
    ids = lines(tmp_path / "d.jsonl", {"prompt_ids": [1], "response_ids": [2, 3]})
    assert load_documents([ids], None).tokens.tolist() == [1, 2, 3]
    tokens = bin_file(tmp_path / "d.bin", [5, 6, 7])
    documents = load_documents([tokens], None)
    assert (documents.tokens.tolist(), len(documents)) == ([5, 6, 7], 1)
    for record in ({"text": "a"}, {"messages": [{"role": "assistant", "content": "a"}]}):
        with pytest.raises(UsageError, match=r"t\.jsonl:1: the target has no tokenizer.*prompt_ids"):
            load_documents([lines(tmp_path / "t.jsonl", record)], None)


def test_records_keep_order_over_batches(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    records = [
        {"text": str(i)} if i % 3 else {"prompt_ids": [], "response_ids": [*str(i).encode(), EOS]} for i in range(200)
    ]
    assert texts(load_documents([lines(tmp_path / "d.jsonl", *records)], tokenizer)) == [str(i) for i in range(200)]


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


def test_a_file_whose_keys_change_late_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """The columns of a .jsonl file are those of its first 10 MB."""
    path = tmp_path / "d.jsonl"
    path.write_text('{"text": "%s"}\n' % ("x" * (11 << 20)) + '{"prompt_ids": [1], "response_ids": [2]}\n')
    with pytest.raises(UsageError, match=r"cannot be read .*expected is records of one form"):
        load_documents([str(path)], tokenizer)


def test_parquet_file_is_read(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    datasets.Dataset.from_dict({"text": ["one", "two"]}).to_parquet(tmp_path / "a.parquet")
    assert texts(load_documents([str(tmp_path / "*.parquet")], tokenizer)) == ["one", "two"]


def test_most_bytes_limits_bin_and_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = bin_file(tmp_path / "a.bin", list(range(100)), header=False)
    assert load_documents([path], None, most_bytes=20).tokens.tolist() == list(range(10))
    rows = datasets.Dataset.from_dict({"prompt_ids": [[0]] * 100, "response_ids": [[n] for n in range(100)]})
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **more: rows)
    found = load_documents(["name"], None, most_bytes=rows.data.nbytes // 10)
    assert found.tokens[1::2].tolist() == list(range(0, 100, 10))


def test_doctor_limits_the_data_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PROMPT_BYTES", 100)
    found, load = [], sources.load_documents
    monkeypatch.setattr(
        sources, "load_documents", lambda *given, **more: found.append(load(*given, **more)) or found[0]
    )
    path = lines(tmp_path / "d.jsonl", *({"text": f"{number:03} words of a text"} for number in range(100)))
    args = argparse.Namespace(data=[path], prompts=4, prompt_tokens=8, max_tokens=8, seed=0)
    prompts, _ = doctor._prompts(args, str(demo.path("target")), 3)
    assert [len(prompt) for prompt in prompts] == [8] * 4
    assert len(found[0]) == 13  # 400 bytes of lines of 33


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.jsonl", "no such file or folder"),
        ("./none", "no such file or folder"),
        ("none*.cfg", "no file matches"),
        ("empty.txt", "the file is empty"),
        ("hollow", r"no \*\.txt, \*\.md, \*\.py, \*\.jsonl file with content"),
    ],
)
def test_missing_data_is_refused_without_reading(tmp_path: Path, name: str, message: str, monkeypatch) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "hollow").mkdir()
    monkeypatch.chdir(tmp_path)
    for given in (name, str(tmp_path / name)):
        with pytest.raises(UsageError, match=message):
            sources.size_of([given])


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
    assert bytes(documents.tokens[documents.trained][:1].astype(np.uint8)) == b"x"
    data = datasets.Dataset.from_dict({"question": ["?"]})
    with pytest.raises(UsageError, match="columns question; a column text or messages is needed"):
        load_documents(["some/chats"], tokenizer)


def test_unknown_name_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UsageError, match=r"data no-such-set: neither a file or folder nor a data set"):
        load_documents(["no-such-set"], tokenizer)


# --- .bin


@pytest.mark.parametrize("header", [True, False], ids=["header", "no header"])
@pytest.mark.parametrize(
    ("tokens", "documents"),
    [
        ([EOS, 1, 2, EOS, 3, EOS, 4, 5], [[EOS, 1, 2], [EOS, 3], [EOS, 4, 5]]),  # led by the end of text, as llm.c's
        ([1, 2, EOS, 3, EOS], [[1, 2, EOS], [3, EOS]]),
        ([1, 2, EOS, 3], [[1, 2, EOS], [3]]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([7] * 5000, [[7] * 5000]),  # without a header, its first tokens are not taken for one
    ],
)
def test_bin_is_split_at_end_of_text(tmp_path: Path, tokenizer, header, tokens, documents) -> None:
    loaded = load_documents([bin_file(tmp_path / "d.bin", tokens, header)], tokenizer)
    assert [loaded[i][0].tolist() for i in range(len(loaded))] == documents
    assert loaded.trained.all()


def test_bad_bin_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    def refused(content: bytes, message: str) -> None:
        path = tmp_path / "bad.bin"
        path.write_bytes(content)
        with pytest.raises(UsageError, match=message) as error:
            load_documents([str(path)], tokenizer)
        assert "bad.bin" in str(error.value)

    good = Path(bin_file(tmp_path / "good.bin", list(range(100)))).read_bytes()
    for content, tokens in (
        (good[:-20], "90.0"),
        (good[:-21], "89.5"),
        (good + b"\0\0", "101.0"),
        (good[:1024], "0.0"),
    ):
        refused(content, rf"tokens \[20240520, 1, 100\]; \[20240520, 1, {tokens}\] are expected")
    refused(good[:4] + b"\2" + good[5:], r"\[20240520, 2, 100\]; \[20240520, 1, 100\.0\] are expected")
    refused(np.array([20240801], "<i4").tobytes() + good[4:], r"\[20240801, 1, 100\]; \[20240520, 1, 100\.0\]")
    refused(b"\1\0\2", "3 bytes of tokens; uint16 tokens are expected")
    refused(Path(bin_file(tmp_path / "empty.bin", [])).read_bytes(), "0 bytes of tokens")
    refused(np.array([5, 9, 300, 400], "<u2").tobytes(), "token id 300 is outside the target's vocabulary of 257")


# --- errors


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n{"text": \n', r"d\.jsonl: cannot be read \(JSON parse error.*row 1\)"),
        (b'{"text": "a"}\n\n[1]\n', r"d\.jsonl: cannot be read \(JSON parse error.*expected is records of one form"),
        (b'{"text": "a"}\n{"text": "\xff"}\n', "cannot be read .*utf-8.*0xff"),
        (b'{"txt": "a"}\n', r"d\.jsonl:1: keys txt; a record must be one of"),
        (b"{}\n", "no document with a token to train on"),
        (b'{"text": 5}\n', r"d\.jsonl:1: text must be a string"),
        (b'{"messages": [{"content": "q"}]}\n', r"d\.jsonl:1: messages must be a list of"),
        (b'{"messages": [{"role": "user", "content": "q"}]}\n', "no document with a token to train on"),
        (b'{"prompt_ids": [1], "response_ids": "23"}\n', r"d\.jsonl:1: response_ids must be a list of integers"),
        (b'{"prompt_ids": [1, 1.5], "response_ids": [2]}\n', r"d\.jsonl:1: prompt_ids must be a list of integers"),
        (b'{"prompt_ids": [1], "response_ids": [true]}\n', r"d\.jsonl:1: response_ids must be a list of integers"),
        (b'{"prompt_ids": [1], "response_ids": [2, 257]}\n', r"d\.jsonl:1: token id 257 is outside .* of 257"),
        (b'{"prompt_ids": [-1], "response_ids": [2]}\n', r"d\.jsonl:1: token id -1 is outside"),
        (b'{"prompt_ids": [99999999999999999999], "response_ids": [2]}\n', "prompt_ids must be a list of integers"),
        (b'{"prompt_ids": [1], "response_ids": []}\n', "no document with a token to train on"),
        (b"\n\n", "no document with a token to train on"),
    ],
)
def test_bad_jsonl_is_refused(tmp_path: Path, tokenizer, content: bytes, message: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message) as error:
        load_documents([str(path)], tokenizer)
    assert len(str(error.value).splitlines()) == 1


def test_bad_text_file_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    for name, content, message in (
        ("latin.txt", "née".encode("latin-1"), "cannot be read .*utf-8.*0xe9"),
        ("zero.txt", b"a\0b", "cannot be read .it holds zero bytes"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError, match=f"{name}: {message}"):
            load_documents([str(tmp_path / name)], tokenizer)


def test_vocabulary_may_exceed_the_tokenizer(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = lines(tmp_path / "d.jsonl", {"prompt_ids": [1], "response_ids": [300]})
    assert load_documents([path], tokenizer, vocab_size=320).tokens.tolist() == [1, 300]
