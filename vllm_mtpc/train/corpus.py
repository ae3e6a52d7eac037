"""The demo corpus: the source text of the Python standard library, as bytes.

It is on every machine that can run this package, so nothing is downloaded. Documents are files in sorted order, each
preceded by the end-of-text token (id 256); every 20th file is held out for validation.
"""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

EOS = 256
VOCAB_SIZE = 257
HOLDOUT = 20
# Folders that are tests or somebody else's code, and not the library's own style.
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
# The build's own configuration (paths of the machine that built the interpreter): not library text.
SKIPPED_PREFIX = "_sysconfigdata"
MIN_BYTES = 64


@dataclass(frozen=True)
class Split:
    """Documents of one part of the corpus in one flat token array."""

    tokens: torch.Tensor  # [N] uint8-valued ids and EOS, int16
    starts: torch.Tensor  # [docs] index of each document's leading EOS
    lines: torch.Tensor  # [lines] index of the first byte of every line


@dataclass(frozen=True)
class Corpus:
    """Both parts, and what identifies them."""

    train: Split
    valid: Split
    sha256: str
    files: int
    bytes: int


def library_files(root: Path) -> list[Path]:
    """The corpus' files under ``root`` in a fixed order (by relative posix path)."""
    found = []
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if not SKIPPED_FOLDERS.intersection(relative.parts[:-1]) and not path.name.startswith(SKIPPED_PREFIX):
            found.append((relative.as_posix(), path))
    return [path for _, path in sorted(found)]


def split(documents: list[bytes]) -> Split:
    """Joins documents, each led by EOS."""
    parts, starts, position = [], [], 0
    for document in documents:
        starts.append(position)
        parts += [torch.tensor([EOS], dtype=torch.int16), torch.frombuffer(bytearray(document), dtype=torch.uint8)]
        position += 1 + len(document)
    tokens = torch.cat([part.to(torch.int16) for part in parts])
    after_newline = (tokens[:-1] == ord("\n")) & (tokens[1:] != EOS)
    return Split(tokens, torch.tensor(starts), after_newline.nonzero()[:, 0] + 1)


def load(root: Path | None = None) -> Corpus:
    """Reads the corpus; ``root`` defaults to the running interpreter's standard library."""
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    texts = [data for path in library_files(root) if len(data := path.read_bytes()) >= MIN_BYTES]
    if len(texts) < HOLDOUT:
        raise ValueError(
            f"the corpus folder {root} has {len(texts)} Python files of {MIN_BYTES} bytes or more, at least {HOLDOUT} "
            "are needed: use an interpreter whose standard library is installed as source files"
        )
    digest = hashlib.sha256()
    for text in texts:
        digest.update(len(text).to_bytes(8, "little") + text)
    held_out = [text for index, text in enumerate(texts) if index % HOLDOUT == HOLDOUT - 1]
    rest = [text for index, text in enumerate(texts) if index % HOLDOUT != HOLDOUT - 1]
    return Corpus(split(rest), split(held_out), digest.hexdigest(), len(texts), sum(map(len, texts)))


def crops(part: Split, count: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Random windows of the text. Returns [count, length] int64.

    A prompt that is served starts anywhere a person starts typing, so 45 % of the windows start at a line, 10 % at a
    document (half of those with its leading EOS) and the rest at any byte.
    """
    last = len(part.tokens) - length
    kind = torch.rand(count, generator=generator)
    anywhere = torch.randint(0, last + 1, (count,), generator=generator)
    line = part.lines[torch.randint(0, len(part.lines), (count,), generator=generator)]
    document = part.starts[torch.randint(0, len(part.starts), (count,), generator=generator)]
    document = document + torch.randint(0, 2, (count,), generator=generator)
    start = torch.where(kind < 0.10, document, torch.where(kind < 0.55, line, anywhere)).clamp(max=last)
    return part.tokens[start[:, None] + torch.arange(length)].long()
