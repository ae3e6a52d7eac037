"""Sections of a head's config: one pydantic model for each choice of a part, with its own bounds and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

from pydantic import BaseModel, ConfigDict

from vllm_mtpc.errors import HeadConfigError, validate

MAX_WIDTH = 2**17  # larger than in any model: bounds reject a damaged config
MAX_LIST = 16  # entries of a list
FEW_IDS = 2000  # largest vocabulary whose leaves and components have weights of their own by default


class Section(BaseModel):
    """A section of `config.json`: unknown keys and other types are errors, and on disk every key is present."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())

    @classmethod
    def defaults(cls, target: Mapping[str, Any]) -> dict[str, Any]:
        """Return the defaults of the fields for a target's config."""
        return {}


class Table:
    """The choices of one part by name: "module:class" of each, imported on first use; a class has `Options`."""

    def __init__(self, part: str, places: dict[str, str]) -> None:
        self.part, self.places = part, places

    def find(self, kind: Any) -> Any:
        """Return the class of a choice; raises HeadConfigError for an unknown name."""
        if kind not in self.places:
            allowed = ", ".join(self.places)
            raise HeadConfigError(f"{self.part}={kind!r}: allowed are {allowed}; set {self.part} to one of them")
        return resolve_name(self.places[kind])

    def parse(self, values: Any) -> Any:
        """Return the `Options` of a section's values; raises HeadConfigError, in one line."""
        if isinstance(values, Section):
            return values
        if not isinstance(values, dict) or "kind" not in values:
            raise HeadConfigError(f"{self.part}: a section with a kind is expected, one of {', '.join(self.places)}")
        return validate(self.find(values["kind"]).Options, values, HeadConfigError, f"{self.part}: ")

    def with_defaults(self, given: Mapping[str, Any], target: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of a section with the defaults of its kind for a target's config."""
        return {**self.find(given.get("kind")).Options.defaults(target), **given}

    def fields(self) -> dict[str, str]:
        """Return the help of every option of all choices by name; it names the choices."""
        kinds: dict[str, dict[str, list[str]]] = {}  # of each option, by its description
        for kind in self.places:
            for name, field in self.find(kind).Options.model_fields.items():
                if name != "kind":
                    kinds.setdefault(name, {}).setdefault(field.description, []).append(kind)
        return {
            name: "; ".join(f"{', '.join(some)}: {about}" for about, some in texts.items())
            for name, texts in kinds.items()
        }
