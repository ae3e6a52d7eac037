"""Training data as documents: text, .jsonl and .parquet files, folders, globs and data sets of the hub."""

from __future__ import annotations

import glob
import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from vllm_mtpc.errors import MtpcError, UsageError, first_line
from vllm_mtpc.report import Bar

FORMS = '{"text": ...}, {"messages": [...]} or {"prompt_ids": [...], "response_ids": [...]}'
COLUMNS = ("prompt_ids", "response_ids", "messages", "text")  # of a data set that are read
TEXT_SUFFIXES = (".txt", ".md", ".py", ".jsonl")  # files that are read in a folder
BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}
DATASET_SUFFIXES = (".parquet", ".arrow", ".csv")  # a folder of these is a data set
BATCH = 64  # records that are tokenised together: fast tokenizers use all cores
Tokenizer = Any  # transformers' PreTrainedTokenizerBase, whose import takes seconds
Record = dict[str, Any]
Messages = Sequence[dict[str, Any]]
Encoded = tuple[list[int], list[bool]]  # token ids; which of them are trained
Source = tuple[str, Record]  # a record after its origin: FILE, FILE:ROW (from 1) or NAME:ROW (from 0)
Documents = list[tuple[np.ndarray, np.ndarray]]  # token ids [T] int32; which of them are trained [T] bool


def is_path(name: str) -> bool:
    """Return whether a name is that of a file, folder or glob, existing or not; other names are those of the hub."""
    path = Path(name).expanduser()
    has_suffix = path.suffix in (*TEXT_SUFFIXES, *BUILDERS)
    return path.exists() or glob.has_magic(name) or has_suffix or name.startswith(("/", ".", "~"))


def files_of(name: str) -> list[Path] | None:
    """Return the files of a name of data, sorted; None: a data set of the hub or a folder of one. Raises UsageError."""
    if not is_path(name):
        return None
    path = Path(name).expanduser()
    found = [path] if path.is_file() else list(map(Path, sorted(glob.glob(str(path), recursive=True))))
    if path.is_dir():
        found = sorted(path.rglob("*"))
        if any(file.suffix in DATASET_SUFFIXES for file in found):
            return None
        found = [file for file in found if file.suffix in TEXT_SUFFIXES]
    if files := [file for file in found if file.is_file() and file.stat().st_size]:
        return files
    kinds = ", *".join(TEXT_SUFFIXES)
    raise UsageError(f"data {name}: no such file or folder with content; name files, or a folder with *{kinds}")


def size_of(data: Sequence[str]) -> int:
    """Return the bytes of the files of the data; raises UsageError as `files_of`."""
    return sum(file.stat().st_size for name in data for file in files_of(name) or ())


def read_records(data: Sequence[str], split: str, most_bytes: int | None = None) -> Iterator[Source]:
    """Yield the records of the data in order, or every n-th of them so that about `most_bytes` are read.

    Raises UsageError if a file or data set cannot be read.
    """
    step, number = max(1, size_of(data) // most_bytes) if most_bytes else 1, count()
    for name in data:
        files = files_of(name)
        if files is None:
            yield from _dataset_records(name, split, most_bytes)
        for file in files or ():
            yield from (record for record in _file_records(file, most_bytes) if next(number) % step == 0)


def _file_records(path: Path, most_bytes: int | None) -> Iterator[Source]:
    builder, origin = BUILDERS.get(path.suffix, "text"), str(path)
    options = {"sample_by": "document"} if builder == "text" else {}
    try:
        rows = _load_dataset(builder, data_files=glob.escape(str(path)), split="train", streaming=True, **options)
        for number, row in enumerate(rows, 1):
            record = {key: value for key, value in row.items() if value is not None}
            if builder != "text":
                origin = f"{path}:{number}"
            elif "\0" in record["text"]:
                raise ValueError("it holds zero bytes")
            else:
                record["text"] = record["text"][:most_bytes]
            yield origin, record
    except ValueError as error:  # of datasets, pyarrow and UTF-8
        form = "text in UTF-8" if builder == "text" else f"records of one form, {FORMS}"
        raise UsageError(f"{origin}: cannot be read ({first_line(error)}); expected is {form}") from None


def _load_dataset(name: str, config: str | None = None, **options: Any) -> Any:
    import datasets

    logging.getLogger("datasets").setLevel(logging.CRITICAL)  # it also logs the errors that it raises
    return datasets.load_dataset(name, config, **options)


def _dataset_records(name: str, split: str, most_bytes: int | None) -> Iterator[Source]:
    from datasets.exceptions import DatasetsError

    folder = Path(name).expanduser()
    path, _, config = (str(folder), "", "") if folder.exists() else name.partition(":")
    try:
        rows = _load_dataset(path, config or None, split=split)
    except (DatasetsError, OSError, ValueError, ImportError) as error:
        raise UsageError(
            f"data {name}: neither a file or folder nor a data set that can be loaded with split {split!r} "
            f"({first_line(error)})"
        ) from None
    rows = rows.select_columns([column for column in COLUMNS if column in rows.column_names] or rows.column_names)
    for number in range(0, len(rows), max(1, rows.data.nbytes // most_bytes) if most_bytes else 1):
        yield f"{name}:{number}", rows[number]


def load_documents(
    data: Sequence[str],
    tokenizer: Tokenizer | None,
    *,
    split: str = "train",
    most_bytes: int | None = None,
    vocab_size: int | None = None,
) -> Documents:
    """Return the tokenised documents of all `data`, in the order given; `split`: of data sets of the hub.

    Without a tokenizer token ids alone are read; they must be below `vocab_size` (default: the tokenizer's). Of larger
    data about `most_bytes` are read: every n-th record. Raises UsageError if a record cannot be read (the message names
    file and row), or nothing can be trained on.
    """
    vocab_size = vocab_size or (None if tokenizer is None else len(tokenizer))
    sources, tokens = read_records(data, split, most_bytes), 0
    found: Documents = []
    with Bar(desc="tokenising", unit="documents", mininterval=1) as bar:
        while batch := list(islice(sources, BATCH)):
            new = _encode(batch, tokenizer, vocab_size)
            tokens += sum(len(ids) for ids, _ in new)
            found += new
            bar.set_postfix(tokens=f"{tokens:,}", refresh=False)
            bar.update(len(new))
    if not any(trained.any() for _, trained in found):
        raise UsageError(f"data {', '.join(data)}: no document with a token to train on; give text or assistant turns")
    return found


def check_first_records(data: Iterable[str], split: str, tokenizer: Tokenizer | None) -> None:
    """Raise UsageError if the first record of any of the data cannot be read or tokenised."""
    for name in data:
        _encode(list(islice(read_records([name], split, 1), 1)), tokenizer, None)


def _encode(batch: list[Source], tokenizer: Tokenizer | None, vocab_size: int | None) -> Documents:
    """Return the documents of some records; raises UsageError that names the record."""
    texts = [record["text"] for _, record in batch if isinstance(record.get("text"), str)]
    encoded = iter(tokenizer(texts, verbose=False)["input_ids"] if tokenizer is not None and texts else ())
    found = []
    for origin, record in batch:
        try:
            text_ids = next(encoded, None) if isinstance(record.get("text"), str) else None
            for ids, trained in _documents(record, tokenizer, text_ids):
                array = np.asarray(ids)
                if vocab_size is not None and len(wrong := array[(array >= vocab_size) | (array < 0)]):
                    raise UsageError(
                        f"token id {wrong[0]} is outside the target's vocabulary of {vocab_size}; use its tokenizer"
                    )
                found.append((array.astype(np.int32), np.asarray(trained, bool)))
        except MtpcError as error:
            raise UsageError(f"{origin}: {error}") from None
    return found


def _documents(record: Record, tokenizer: Tokenizer | None, text_ids: list[int] | None) -> list[Encoded]:
    """Return the documents of a record; token ids and messages take precedence over its text."""
    if "prompt_ids" in record and "response_ids" in record:
        prompt, response = exact_ids(record, "prompt_ids"), exact_ids(record, "response_ids")
        return [(prompt + response, [False] * len(prompt) + [True] * len(response))]
    if "messages" not in record and "text" not in record:
        raise UsageError(f"keys {', '.join(map(str, record)) or '(none)'}; a record must be one of {FORMS}")
    if tokenizer is None:
        raise UsageError("the target has no tokenizer for text and messages; give prompt_ids and response_ids")
    if "messages" in record:
        return encode_chat(record["messages"], tokenizer)
    if text_ids is None:
        raise UsageError("text must be a string")
    eos = tokenizer.eos_token_id
    ids = text_ids if eos is None or text_ids[-1:] == [eos] else [*text_ids, eos]
    return [(ids, [True] * len(ids))]


def exact_ids(record: Record, key: str) -> list[int]:
    """Return the token ids under a key; raises UsageError unless they are a list of integers."""
    value = record[key]
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise UsageError(f"{key} must be a list of integers")
    return value


def encode_chat(messages: Messages, tokenizer: Tokenizer) -> list[Encoded]:
    """Return the documents of a conversation in the target's chat template, usually one; raises UsageError.

    Trained are the tokens that the target generates: the assistant's turns, each with the token that ends it. Some
    templates render an earlier turn differently from the last one (they drop its reasoning); then every assistant's
    turn becomes a document with the prompt that serving sends.
    """
    if tokenizer.chat_template is None:
        raise UsageError("the target has no chat template for messages; give text, or prompt_ids and response_ids")
    if not messages or not is_chat(messages):
        raise UsageError('messages must be a list of {"role": ..., "content": ...} of one message or more')
    special, documents = special_ids(tokenizer), []
    for turn in [index for index, message in enumerate(messages) if message["role"] == "assistant"]:
        prompt = chat_prompt(messages[:turn], tokenizer)
        tokens, begin = chat_prompt(messages[: turn + 1], tokenizer, prompt=False), len(prompt)
        if tokens[:begin] != prompt or len(tokens) == begin:
            raise UsageError(
                f"the chat template renders message {turn + 1}, an assistant's, without its generation prompt "
                "(add_generation_prompt); correct the template, or give prompt_ids and response_ids"
            )
        end = max((at + 1 for at in range(begin, len(tokens)) if tokens[at] in special), default=len(tokens))
        if tokenizer.decode(tokens[end:]).strip():  # more than white space: the turn goes on after its special tokens
            end = len(tokens)
        documents.append((tokens, [begin <= index < end for index in range(len(tokens))]))
    if not documents:
        tokens = chat_prompt(messages, tokenizer, prompt=False)
        return [(tokens, [False] * len(tokens))]
    whole = documents[-1][0]
    if any(whole[: len(tokens)] != tokens for tokens, _ in documents):
        return documents
    return [(whole, list(map(any, zip_longest(*(trained for _, trained in documents)))))]


def special_ids(tokenizer: Tokenizer) -> set[int]:
    """Return the ids of the special tokens, also of those without a role."""
    return {*tokenizer.all_special_ids, *(i for i, one in tokenizer.added_tokens_decoder.items() if one.special)}


def is_chat(messages: object) -> bool:
    return isinstance(messages, list) and all(isinstance(turn, dict) and "role" in turn for turn in messages)


def chat_prompt(messages: Messages, tokenizer: Tokenizer, origin: str = "", prompt: bool = True) -> list[int]:
    """Return the token ids of a conversation, with the generation prompt if `prompt`, as serving sends them."""
    how = {"tokenize": True, "return_dict": True, "add_generation_prompt": prompt}
    return list(render_chat(messages, tokenizer, origin, **how)["input_ids"])


def render_chat(messages: Messages, tokenizer: Tokenizer, origin: str, **how: Any) -> Any:
    """Return what `apply_chat_template` returns; raises UsageError, after `origin`, if it refuses the messages."""
    try:
        return tokenizer.apply_chat_template(list(messages), **how)
    except Exception as error:  # templates are programs that raise any exception
        raise UsageError(
            f"{origin}the chat template refuses the messages: {first_line(error)}; correct them, or give text or "
            "token ids"
        ) from None
