"""An option declared in the registry of heads and nowhere else is an argument, field, flag and row of the docs."""

from __future__ import annotations

import subprocess
import sys

from vllm_mtpc.heads.linear import LinearHead


class Scaled(LinearHead):
    """A head with an option: a factor of its unembeddings."""

    def add_leaves(self, unembedding_scale: float) -> None:
        super().add_leaves()
        self.scale = unembedding_scale


DECLARED = """
import vllm_mtpc.heads as heads
SCALE = heads.Option("unembedding_scale", 0.5, "factor of the unembeddings", ge=0, le=4)
heads.HEADS["scaled"] = heads.Entry("tests.heads.test_options:Scaled", (SCALE,))

import argparse
import pytest
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.errors import HeadConfigError
from vllm_mtpc.train import command

target = {"model_type": "llama", "vocab_size": 5, "hidden_size": 8}
sizes = dict(circuit="cp", window=4, num_components=2, target=target, verifier="../target")
config = HeadConfig.create(**sizes, head="scaled")
assert config.unembedding_scale == 0.5 and heads.build_head(config).scale == 0.5
assert HeadConfig.parse({**config.model_dump(exclude_none=True), "unembedding_scale": 2.0}).unembedding_scale == 2
assert "unembedding_scale" not in HeadConfig.create(**sizes).to_json()
with pytest.raises(HeadConfigError, match="unembedding_scale.*less than or equal to 4"):
    HeadConfig.create(**sizes, head="scaled", unembedding_scale=5.0)
with pytest.raises(HeadConfigError, match="unembedding_scale=2.0 is not an option of head 'linear'"):
    HeadConfig.create(**sizes, unembedding_scale=2.0)

parser = argparse.ArgumentParser()
command.add_arguments(parser)
words = "--target T --data D --out O --head scaled --circuit cp --unembedding-scale 3"
options = command.read_options(parser.parse_args(words.split()))
assert options.unembedding_scale == 3

from tests.support.files import row
assert row("unembedding_scale") == "| `unembedding_scale` |  | head scaled: factor of the unembeddings (default: 0.5) |"
"""


def test_option_of_the_registry_is_in_config_flags_and_docs(root) -> None:
    """In a separate process, where the entry is in the registry from the start."""
    child = subprocess.run([sys.executable, "-c", DECLARED], capture_output=True, text=True, timeout=120, cwd=root)
    assert child.returncode == 0, child.stderr[-2000:]
