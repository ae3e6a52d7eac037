"""The files of a head that are published, and its model card with complete metadata."""

from __future__ import annotations

import logging
from pathlib import Path

import yaml
from huggingface_hub import ModelCard

from vllm_mtpc.checkpoint import metadata
from vllm_mtpc.checkpoint.inspect import inspect_head
from vllm_mtpc.checkpoint.load import ADAPTER_FILES, read_config
from vllm_mtpc.checkpoint.locate import CONFIG_FILE, PROVENANCE_FILE, U_EMBED_FILE, WEIGHTS_FILE, hub_name, is_head
from vllm_mtpc.errors import CheckpointError, UsageError, first_line

# A head's folder may also hold the trainer's state, responses and the user's files: these are not sent.
OWN_FILES = (CONFIG_FILE, WEIGHTS_FILE, U_EMBED_FILE, *ADAPTER_FILES, PROVENANCE_FILE)
PUBLISHED = (*OWN_FILES, *metadata.PLOTS, "LICENSE", "NOTICE")


def published_files(folder: Path) -> list[Path]:
    """Return the files of the head in `folder` that are sent, without its card.

    Raises:
        UsageError: The folder holds no head.
    """
    if not is_head(folder):
        raise UsageError(f"{folder} is no head's folder; name the folder that `vllm-mtpc train` or `convert` wrote")
    return [folder / name for name in PUBLISHED if (folder / name).is_file()]


def complete_card(folder: Path, repo: str, license: str | None, is_online: bool) -> ModelCard:
    """Return the folder's card with metadata of the head; other keys of its author are kept.

    Args:
        folder: The head. Every tensor is checked.
        repo: OWNER/NAME on the hub.
        license: Licence of the head; None: that of its card, else that of its target.
        is_online: Whether the target's card is looked up on the hub.

    Raises:
        CheckpointError: The head cannot be loaded, its target is a local folder, or its README.md cannot be read.
    """
    report, config, file = inspect_head(folder), read_config(folder), folder / "README.md"
    name = report["target"]["name_or_path"]
    target = hub_name(name)
    if target is None:
        raise CheckpointError(
            f"{folder}: its target is the local folder {name!r}; put the target's name on the hub, OWNER/NAME, into "
            f"{CONFIG_FILE} (speculators_config.verifier.name_or_path)"
        )
    title, source = f"{report['method']} head, n={report['window']}", f"A draft head for `{target}`."
    logging.getLogger("huggingface_hub.repocard").setLevel(logging.ERROR)  # it warns of a card without metadata
    try:
        text = file.read_text(encoding="utf-8") if file.is_file() else metadata.converted_card(config, title, source)
        card = ModelCard(text, ignore_metadata_errors=True)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise CheckpointError(f"{file}: cannot be read ({first_line(error)}); fix or delete it") from None
    for plot, caption in metadata.PLOTS.items():
        if (folder / plot).is_file() and f"({plot})" not in card.text:
            card.text = f"{card.text.rstrip()}\n\n![{caption}]({plot})\n"
    labels = {"t1": f"T={config.trained_temperature:g}", "t0": "T=0"}
    measured = {labels[key]: value for key, value in report["tokens_per_step"].items()}
    terms = {"license": license} if license else metadata.license_of(file) or metadata.target_license(target, is_online)
    results = metadata.eval_results(measured, metadata.measured_on(report["provenance"] or {}))
    own = metadata.card_data(metadata.tags_of(config), target, terms, results, repo.rpartition("/")[2])
    kept = {
        key: value for key, value in card.data.to_dict().items() if key not in (*metadata.LICENSE_KEYS, "model-index")
    }
    tags = [*(kept["tags"] if isinstance(kept.get("tags"), list) else []), *metadata.tags_of(config)]
    card.data = type(own)(**kept | own.to_dict() | {"tags": list(dict.fromkeys(tags))})
    return card
