"""Training data as the user names it: text files, folders, globs, .jsonl, .bin, `datasets` names; as documents."""

from __future__ import annotations

import glob
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vllm_mtpc.data.chat import encode_chat
from vllm_mtpc.data.names import DATASET_SUFFIXES, FOLDER_SUFFIXES, is_path
from vllm_mtpc.errors import MtpcError, UsageError, first_line
from vllm_mtpc.progress import Bar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMS = '{"text": ...}, {"messages": [...]} or {"prompt_ids": [...], "response_ids": [...]}'
COLUMNS = (("prompt_ids", "response_ids"), ("messages",), ("text",))  # of a data set: the first of these that it has
PIECE_BYTES = 1 << 16  # the least that is taken of a text
BATCH = 64  # records tokenised at a time; fast tokenizers use all cores on them
BIN_MAGIC, BIN_VERSION, BIN_HEADER_BYTES = 20240520, 1, 256 * 4
OTHER_MAGICS = range(20200101, 20400101)  # formats of this family are numbered by the day they were made on
Record = dict[str, Any]
Encoded = tuple[Sequence[int] | np.ndarray, Sequence[bool] | np.ndarray]  # token ids; which are targets of the loss


@dataclass(frozen=True)
class Documents:
    """Document i is `tokens[offsets[i] : offsets[i + 1]]`; five bytes per token, however many documents."""

    tokens: np.ndarray  # [T] int32
    trained: np.ndarray  # [T] bool: the token is a target of the loss
    offsets: np.ndarray  # [N + 1] int64

    @classmethod
    def join(cls, documents: Iterable[Encoded]) -> Documents:
        """Documents from (tokens, trained) pairs."""
        tokens: list[np.ndarray] = [np.empty(0, np.int32)]
        trained: list[np.ndarray] = [np.empty(0, bool)]
        for ids, mask in documents:
            tokens.append(np.asarray(ids, np.int32))
            trained.append(np.asarray(mask, bool))
        offsets = np.cumsum([0, *(len(ids) for ids in tokens[1:])], dtype=np.int64)
        return cls(np.concatenate(tokens), np.concatenate(trained), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, trained) of a document from 0 on, both views."""
        part = slice(self.offsets[index], self.offsets[index + 1])
        return self.tokens[part], self.trained[part]

    @property
    def lengths(self) -> np.ndarray:
        """[N] int64, tokens of each document."""
        return np.diff(self.offsets)

    def select(self, chosen: np.ndarray) -> Documents:
        """The documents where chosen, [N] bool, is true, in their order."""
        tokens = np.repeat(chosen, self.lengths)
        offsets = np.concatenate([[0], np.cumsum(self.lengths[chosen])])
        return Documents(self.tokens[tokens], self.trained[tokens], offsets)


class Source(NamedTuple):
    """One record and where it is from."""

    origin: str  # FILE, FILE:LINE or NAME:ROW
    record: Record


def load_documents(
    data: list[str],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    split: str = "train",
    most_bytes: int | None = None,
    vocab_size: int | None = None,
) -> Documents:
    """Documents of all `data`, tokenised, in the order given.

    data: each a text file (one document), a folder (its *.txt, *.md, *.py and *.jsonl files in sorted order), a glob, a
    .jsonl file, a .bin file, or NAME or NAME:CONFIG of the `datasets` library. split: of a datasets name.
    tokenizer: the target's; None is enough for prompt_ids and .bin files.
    most_bytes: of more than that, about so much is read, spread over all of it (`Share`).
    vocab_size: the target's; ids must be below it (default: the tokenizer's).

    Raises UsageError, naming file and line, for what cannot be read, and if nothing can be trained on.
    """
    vocab_size = vocab_size or (None if tokenizer is None else len(tokenizer))
    documents = Documents.join(_encoded(read_records(data, split, most_bytes), tokenizer, vocab_size))
    if not documents.trained.any():
        raise UsageError(f"data {', '.join(data)}: no document with a token to train on; give text or assistant turns")
    return documents


def files_of(name: str) -> list[Path] | None:
    """The files that a name of data stands for, in order; None for one of the `datasets` library.

    Reads nothing. Raises UsageError where there is no file, or nothing in it.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        if any(file.suffix in DATASET_SUFFIXES for file in files):
            return None
        found = [file for file in files if file.suffix in FOLDER_SUFFIXES and file.stat().st_size]
        if not found:
            suffixes = ", ".join(f"*{suffix}" for suffix in sorted(FOLDER_SUFFIXES))
            raise UsageError(f"data {path}: no {suffixes} file with content in it")
        return found
    if not is_path(name):
        return None
    matches = [path] if path.exists() else map(Path, sorted(glob.glob(str(path), recursive=True)))
    found = [file for file in matches if file.is_file()]
    if not found:
        wrong = "no file matches" if glob.has_magic(name) else "no such file or folder; name one that exists"
        raise UsageError(f"data {name}: {wrong}")
    for file in found:
        if not file.stat().st_size:
            raise UsageError(f"{file}: the file is empty")
    return found


def size_of(data: Iterable[str]) -> int:
    """Bytes of the files of the data. Raises UsageError as `files_of`."""
    return sum(file.stat().st_size for name in data for file in files_of(name) or ())


def check_first_records(data: Iterable[str], split: str, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Raises UsageError where the first record of any of the data cannot be read or tokenised."""
    for name in data:
        for origin, record in islice(read_records([name], split, 1), 1):
            try:
                if tokenizer is None or not _is_text(record):
                    _others(record, tokenizer)
            except MtpcError as error:
                raise UsageError(f"{origin}: {error}") from None


class Share:
    """Part of the data, spread evenly over it: a record is taken while less than the part has been taken before it."""

    def __init__(self, size: int, most: int | None) -> None:
        self.part = 1.0 if most is None else min(1.0, most / max(1, size))
        self._passed = self._taken = 0.0

    def takes(self, size: int, length: int) -> bool:
        """Whether `length` bytes of the next record, which has `size`, are taken; of the first one yes."""
        taken = self._taken <= self.part * self._passed
        self._passed += size
        self._taken += taken * length
        return taken


def read_records(data: Iterable[str], split: str, most_bytes: int | None = None) -> Iterator[Source]:
    """Every record of the data with where it is from, in order; raises UsageError for what cannot be read.

    most_bytes: as of `load_documents`.
    """
    names = [(name, files_of(name)) for name in data]
    share = Share(size_of(name for name, files in names if files), most_bytes)
    for name, files in names:
        if files is None:
            yield from _dataset(str(Path(name).expanduser()) if is_path(name) else name, split, most_bytes)
        for file in files or ():
            yield from _file(file, share)


def _file(path: Path, share: Share) -> Iterator[Source]:
    size = path.stat().st_size
    if path.suffix == ".bin":
        yield Source(str(path), {"bin": path, "part": share.part})
    elif path.suffix == ".jsonl":
        yield from _jsonl(path, share)
    elif share.takes(size, length := min(size, max(PIECE_BYTES, math.ceil(share.part * size)))):
        with path.open("rb") as file:  # all of a short text, or a piece from the middle
            file.seek((size - length) // 2)
            raw = file.read(length)
        text = _decode(raw, str(path)) if len(raw) == size else raw.decode("utf-8", "ignore")  # cut within a letter
        if "\0" in text:
            raise UsageError(f"{path}: not a text file (it holds zero bytes); token files must be named .bin")
        yield Source(str(path), {"text": text})


def _jsonl(path: Path, share: Share) -> Iterator[Source]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip() or not share.takes(len(line), len(line)):
                continue
            origin = f"{path}:{number}"
            try:
                record = json.loads(_decode(line, origin))
            except json.JSONDecodeError as error:
                raise UsageError(f"{origin}: not JSON ({error.msg} at column {error.colno})") from None
            if not isinstance(record, dict):
                raise UsageError(f"{origin}: a line must be one of {FORMS}")
            yield Source(origin, record)


def _decode(raw: bytes, origin: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{origin}: not UTF-8 (byte {error.start} is 0x{raw[error.start]:02x}); convert it") from None


def _dataset(name: str, split: str, most_bytes: int | None) -> Iterator[Source]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    path, _, config = (name, "", "") if Path(name).exists() else name.partition(":")
    try:
        rows = load_dataset(path, config or None, split=split)
    except (DatasetsError, OSError, ValueError, ImportError) as error:
        raise UsageError(
            f"data {name}: neither a file or folder nor a data set that can be loaded with split {split!r} "
            f"({first_line(error)})"
        ) from None
    wanted = next((columns for columns in COLUMNS if {*columns} <= {*rows.column_names}), None)
    if wanted is None:
        raise UsageError(f"data {name}: columns {', '.join(rows.column_names)}; a column text or messages is needed")
    rows = rows.select_columns(list(wanted))
    step = 1 if most_bytes is None else max(1, rows.data.nbytes // max(1, most_bytes))
    for number, row in enumerate(rows if step == 1 else rows.select(range(0, len(rows), step))):
        yield Source(f"{name}:{number * step}", row)


def read_bin(path: Path) -> np.ndarray:
    """Token ids [T] uint16 of a `.bin` file, memory-mapped: of llm.c, of the paper's authors, or of nanoGPT.

    256 int32 (20240520, version 1, number of tokens, zeros), then the tokens as uint16, all little-endian; nanoGPT's
    files are the tokens alone. Raises UsageError for another format and for a truncated file.
    """
    size, offset = path.stat().st_size, 0
    header = np.fromfile(path, "<i4", 256)
    if size >= BIN_HEADER_BYTES and header[0] == BIN_MAGIC:
        offset = BIN_HEADER_BYTES
        if header[1] != BIN_VERSION:
            raise UsageError(f"{path}: version {header[1]} of the .bin format; only version {BIN_VERSION} is known")
        present = (size - offset) / 2
        if present != header[2]:
            raise UsageError(
                f"{path}: the header says {header[2]} tokens and the file holds {present:g}; it is cut off or damaged, "
                "write it again"
            )
    elif len(header) == 256 and header[0] in OTHER_MAGICS and not header[8:].any():
        raise UsageError(
            f"{path}: magic number {header[0]} is not {BIN_MAGIC}; only .bin files of uint16 tokens with that number, "
            "or with no header, are read"
        )
    if (size - offset) % 2:
        raise UsageError(
            f"{path}: {size} bytes are no whole number of uint16 tokens; the file is cut off, write it again"
        )
    if size == offset:
        raise UsageError(f"{path}: holds no tokens")
    return np.memmap(path, "<u2", "r", offset)


def _encoded(
    sources: Iterator[Source], tokenizer: PreTrainedTokenizerBase | None, vocab_size: int | None
) -> Iterator[Encoded]:
    """Documents of the records, with a bar of documents and tokens."""
    tokens = 0
    with Bar(desc="tokenising", unit=" documents", mininterval=1) as bar:
        while batch := list(islice(sources, BATCH)):
            plain = [at for at, one in enumerate(batch) if tokenizer is not None and _is_text(one.record)]
            texts = dict(zip(plain, _texts([batch[at].record["text"] for at in plain], tokenizer), strict=True))
            for at, (origin, record) in enumerate(batch):
                try:
                    documents = [texts[at]] if at in texts else _others(record, tokenizer)
                    documents = [(_checked(ids, vocab_size), trained) for ids, trained in documents]
                except MtpcError as error:
                    raise UsageError(f"{origin}: {error}") from None
                tokens += sum(len(ids) for ids, _ in documents)
                bar.update(len(documents))
                yield from documents
            bar.set_postfix(tokens=f"{tokens:,}", refresh=False)


def _is_text(record: Record) -> bool:
    """Exact ids and messages win over a text next to them."""
    is_other = "messages" in record or {"prompt_ids", "response_ids"} <= record.keys()
    return isinstance(record.get("text"), str) and not is_other


def _texts(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[Encoded]:
    """Texts with the tokenizer's special tokens and the end of text, everything trained."""
    if texts:
        eos = tokenizer.eos_token_id
        for ids in tokenizer(texts, verbose=False)["input_ids"]:
            ended = ids if eos is None or ids[-1:] == [eos] else [*ids, eos]
            yield ended, np.ones(len(ended), bool)


def _others(record: Record, tokenizer: PreTrainedTokenizerBase | None) -> list[Encoded]:
    """Documents of a record that is no text, or of one that cannot be read."""
    if "bin" in record:
        tokens = read_bin(record["bin"])
        tokens = tokens[: math.ceil(record["part"] * len(tokens))]
        at = np.flatnonzero(tokens == getattr(tokenizer, "eos_token_id", None))
        at = at if 0 in at[:1] else at + 1  # documents are led by the end of text where the file is, else end with it
        return [(part, np.ones(len(part), bool)) for part in np.split(tokens, at) if len(part)]
    if "prompt_ids" in record and "response_ids" in record:
        prompt, response = (exact_ids(record, key) for key in ("prompt_ids", "response_ids"))
        return [(prompt + response, [False] * len(prompt) + [True] * len(response))]
    if "messages" not in record and "text" not in record:
        raise UsageError(f"keys {', '.join(map(str, record)) or '(none)'}; a record must be one of {FORMS}")
    if tokenizer is None:
        raise UsageError(
            "the target has no tokenizer, which text and messages need; give prompt_ids and response_ids, or .bin files"
        )
    if "messages" in record:
        return [*encode_chat(record["messages"], tokenizer)]
    raise UsageError("text must be a string")


def _checked(ids: Sequence[int] | np.ndarray, vocab_size: int | None) -> np.ndarray:
    """The ids as int32; raises UsageError for one outside the vocabulary."""
    array = np.asarray(ids)
    if vocab_size is not None and len(wrong := array[(array >= vocab_size) | (array < 0)]):
        raise UsageError(
            f"token id {wrong[0]} is outside the target's vocabulary of {vocab_size}; the data was made with another "
            "tokenizer"
        )
    return array.astype(np.int32)


def exact_ids(record: Record, key: str) -> list[int]:
    """Token ids given as such; raises UsageError."""
    value = record[key]
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise UsageError(f"{key} must be a list of integers")
    return value
