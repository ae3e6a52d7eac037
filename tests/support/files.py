"""Files of heads as tests look at them: a card's front matter, bytes damaged at random."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import yaml


def front_matter_of(folder: Path) -> dict[str, Any]:
    """The YAML in front of a folder's README.md."""
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert text.startswith("---\n")
    return yaml.safe_load(text.split("---\n")[1])


WORDS = [b"null", b"-1", b"0", b"9" * 18, b"9" * 5000, b"1e999", b"NaN", b'"\\n"', b'"\\ud800"', b"[]", b"{}", b"true"]


def mutate(data: bytes, rng: random.Random) -> bytes:
    """One to four changes: a byte flipped, inserted or removed, a piece cut or doubled, a value replaced."""
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.randint(1, 20))
        kind = rng.randrange(6)
        if kind == 0 and at < len(data):
            data = data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
        elif kind == 1:
            data = data[:at] + rng.randbytes(1) + data[at:]
        elif kind == 2:
            data = data[:at] + data[end:]
        elif kind == 3:
            data = data[:end] + data[at:]
        else:
            values = list(re.finditer(rb'-?\d+(?:\.\d+)?|"[^"]*"', data))
            if values:
                value = rng.choice(values)
                data = data[: value.start()] + rng.choice(WORDS) + data[value.end() :]
        data = data or b"x"
    return data
