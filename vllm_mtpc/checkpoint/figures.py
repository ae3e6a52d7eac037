"""What a head's provenance.json says about its acceptance; nothing at all is as good as a damaged file."""

from __future__ import annotations

import math
from pathlib import Path

from vllm_mtpc.checkpoint.locate import PROVENANCE_FILE
from vllm_mtpc.errors import CheckpointError
from vllm_mtpc.files import read_json


def measured_acceptance(folder: Path) -> dict[str, list[float]]:
    """P(the first k drafts are all accepted), k = 1, 2, ..., by temperature: keys "t1" and "t0", or those there are.

    Measured by the trainer on held-out text, not conditional on the drafts before. Empty where nothing can be read:
    figures are advice, a head is served without them.
    """
    try:
        figures = read_json(folder / PROVENANCE_FILE)["figures"]
        found = {key: figures[key]["per_position"] for key in ("t1", "t0") if key in figures}
    except (CheckpointError, KeyError, TypeError):
        return {}
    return {key: list(values) for key, values in found.items() if _is_survival(values)}


def _is_survival(values: object) -> bool:
    numbers = isinstance(values, list) and all(isinstance(value, (int, float)) for value in values)
    return bool(numbers and values) and all(math.isfinite(value) and 0 <= value <= 1 for value in values)
