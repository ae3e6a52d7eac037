"""The table of options in docs/training.md: the row that a field of TrainOptions has there."""

from __future__ import annotations

from vllm_mtpc.train.options import TrainOptions


def row(name: str) -> str:
    """The line of docs/training.md about an option."""
    field = TrainOptions.model_fields[name]
    words = {None: "", False: "off", True: "on"}
    shown = "" if field.default == [] else words.get(field.default, f"`{field.default}`")
    if type(field.default) in (int, float):  # 0 and 1 are no words
        shown = f"`{field.default}`"
    description = field.description.replace("|", "\\|")
    return f"| `{name}` | {'required' if field.is_required() else shown} | {description} |"
