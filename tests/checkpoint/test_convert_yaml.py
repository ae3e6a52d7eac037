"""config.yaml: what OmegaConf leaves in a saved file is looked up as it would, or refused by name."""

from __future__ import annotations

import pytest

from vllm_mtpc.checkpoint.convert.yaml import Settings
from vllm_mtpc.errors import CheckpointError

TEXT = """\
n: 8
lm: {width: 16, last: [2, 3], name: byte}
circuit:
  n_token: ${n}
  model: {n_token: "${circuit.n_token}", width: "${lm.width}"}
copy: ${circuit.model}
layers: ${lm.last}
title: ${lm.name}-${n}
environment: ${oc.env:HOME}
nothing: null
self: ${self}
a: ${b}
b: ${a}
time: ${now:%Y}
parent: {child: "${.sibling}", sibling: 1}
nested: ${lm.${lm.name}}
escaped: \\${n}
absent: ${lm.depth}
missing: ???
inside: [1, "${time}"]
"""


@pytest.fixture
def settings(tmp_path) -> Settings:
    (tmp_path / "config.yaml").write_text(TEXT)
    return Settings.read(tmp_path / "config.yaml")


@pytest.mark.parametrize(
    "path, value",
    [
        ("n", 8),
        ("circuit.model.n_token", 8),
        ("copy.width", 16),
        ("layers", [2, 3]),
        ("nothing", None),
        ("nowhere", "default"),
        ("n.deeper", "default"),
        ("parent.sibling", 1),
    ],
)
def test_values(settings, path, value):
    assert settings.value(path, "default") == value


@pytest.mark.parametrize(
    "path, word",
    [
        ("self", "Recursive"),
        ("a", "Recursive"),
        ("time", "Missing mandatory value: time"),
        ("inside", "Missing mandatory value: time"),
        ("parent.child", "parent.child"),
        ("nested", "nested"),
        ("title", "title"),
        ("environment", "environment"),
        ("escaped", "escaped"),
        ("absent", "'lm.depth' not found"),
        ("missing", "missing"),
        ("copy", "a value or a list of values"),
    ],
)
def test_what_is_not_known_is_refused_by_name(settings, path, word):
    with pytest.raises(CheckpointError) as error:
        settings.value(path)
    assert word in str(error.value) and "config.yaml" in str(error.value)


def test_sections(settings):
    for path in ("circuit.model", "copy"):
        assert settings.section(path, ["n_token", "width"]) == {"n_token": 8, "width": 16}
    assert settings.section("nothing", []) == {}
    with pytest.raises(CheckpointError, match=r"circuit\.model has unknown width; known: n_token"):
        settings.section("circuit.model", ["n_token"])
    with pytest.raises(CheckpointError, match="a mapping is expected"):
        settings.section("layers", [])


@pytest.mark.parametrize("text", ["[", "- 1", "", "a: !!python/object/apply:os.getcwd []", "\x00"])
def test_other_files_are_refused(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.yaml"):
        Settings.read(tmp_path / "config.yaml")
