"""What of a head's folder goes to the hub: the files of the head and no others, and a card that is complete."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from huggingface_hub import ModelCard

from vllm_mtpc.checkpoint.inspect import Report, inspect_head
from vllm_mtpc.checkpoint.load import ADAPTER_FILES, read_config
from vllm_mtpc.checkpoint.locate import CONFIG_FILE, RECORDS, U_EMBED_FILE, WEIGHTS_FILE, hub_name, is_head
from vllm_mtpc.checkpoint.metadata import (
    LICENSE_KEYS,
    PLOTS,
    card_data,
    converted_card,
    eval_results,
    license_of,
    measured_on,
    tags_of,
    target_license,
)
from vllm_mtpc.errors import CheckpointError, UsageError, first_line

CARD = "README.md"
# A trainer's folder also has its state, responses and logs, and a user's may have anything.
PUBLISHED = (CONFIG_FILE, WEIGHTS_FILE, U_EMBED_FILE, *ADAPTER_FILES, *RECORDS, *PLOTS, "LICENSE", "NOTICE")


class Upload(NamedTuple):
    """What is sent: files as they are, and the card, which need not be the folder's."""

    files: list[Path]
    card: ModelCard
    left: list[str]  # what of the folder stays behind

    @property
    def sizes(self) -> dict[str, int]:
        card = {CARD: len(str(self.card).encode())}
        return card | {file.name: file.stat().st_size for file in self.files}


def gather(folder: Path, name: str, license: str | None, is_online: bool) -> Upload:
    """What is published of the head in `folder` as `name`; every tensor is checked.

    Raises an MtpcError where there is no head, where it would not load, or where its target is a folder.
    """
    if not is_head(folder):
        raise UsageError(f"{folder} is no head's folder; name the folder that `vllm-mtpc train` or `convert` wrote")
    report = inspect_head(folder)
    target = hub_name(report["target"]["name_or_path"])
    if target is None:
        raise CheckpointError(
            f"{folder}: its target is the folder {report['target']['name_or_path']!r}, which nobody else has; put the "
            f"target's name on the hub, OWNER/NAME, into {CONFIG_FILE} (speculators_config.verifier.name_or_path)"
        )
    files = [folder / one for one in PUBLISHED if (folder / one).is_file()]
    kept = {CARD, *(file.name for file in files)}
    left = sorted(path.name + "/" * path.is_dir() for path in folder.iterdir() if path.name not in kept)
    named = {"license": license} if license else license_of(folder / CARD) or target_license(target, is_online)
    return Upload(files, _card(folder, report, target, named, name), left)


def _card(folder: Path, report: Report, target: str, license: dict[str, Any], name: str) -> ModelCard:
    """The folder's card, or a short one, with metadata that say what the head is; keys of its author's are kept."""
    config = read_config(folder)
    record = report["provenance"] or {}
    names = {"t1": f"T={config.trained_temperature:g}", "t0": "T=0"}
    measured = {names[key]: value for key, value in report["tokens_per_step"].items()}
    texts = measured_on(record)
    data = card_data(tags_of(config), target, license, eval_results(measured, texts), name.rpartition("/")[2])
    logging.getLogger("huggingface_hub.repocard").setLevel(logging.ERROR)  # of a card without metadata: they follow
    try:
        if (folder / CARD).is_file():
            card = ModelCard.load(folder / CARD, ignore_metadata_errors=True)
        else:
            title = f"{report['method']} head, n={report['window']}"
            card = ModelCard(converted_card(config, title, f"A draft head for `{target}`."))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise CheckpointError(f"{folder / CARD}: cannot be read ({first_line(error)}); mend or delete it") from None
    for file, words in PLOTS.items():
        if (folder / file).is_file() and f"({file})" not in card.text:
            card.text = f"{card.text.rstrip()}\n\n![{words}]({file})\n"
    author = card.data.to_dict()
    author = {key: value for key, value in author.items() if key not in (*LICENSE_KEYS, "base_model", "model-index")}
    own = data.to_dict()
    own["tags"] = list(dict.fromkeys([*_listed(author.get("tags")), *own["tags"]]))
    card.data = type(data)(**author | own)
    return card


def _listed(value: object) -> list[str]:
    return [str(one) for one in value] if isinstance(value, list) else []
