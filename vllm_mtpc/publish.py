"""`vllm-mtpc push`: upload a checked head folder with a complete model card to the hub, in one commit."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_mtpc.errors import CheckpointError, UsageError, first_line

if TYPE_CHECKING:
    import argparse

    from huggingface_hub import ModelCard


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=Path, metavar="FOLDER", help="the head")
    add("repo", metavar="OWNER/NAME", help="its repository on the hub, created if it does not exist")
    add("--license", metavar="ID", help="the head's licence, as apache-2.0 (default: its card's, else its target's)")
    add("--private", action="store_true", help="create the repository as a private one")
    add("--dry-run", action="store_true", help="check and list the files and send nothing; needs no network")


def run(args: argparse.Namespace) -> int:
    from huggingface_hub import CommitOperationAdd, HfApi

    files = published_files(args.folder)
    card = complete_card(args.folder, args.repo, args.license, is_online=not args.dry_run)
    names = {"README.md", *(file.name for file in files)}
    left = sorted(path.name + "/" * path.is_dir() for path in args.folder.iterdir() if path.name not in names)
    for file in files:
        print(f"{file.stat().st_size:>15,}  {file.name}")
    print(f"left out: {', '.join(left) or 'nothing'}\nREADME.md with the metadata:\n{card.data.to_yaml()}")
    if "license" not in card.data.to_dict():
        print("hint: no licence, so others may not use the head; name one with --license (the target's may bind it)")
    if args.dry_run:
        print(f"nothing was sent; without --dry-run it goes to {args.repo}")
        return 0
    api = HfApi(library_name="vllm_mtpc")
    try:
        repo = api.create_repo(args.repo, private=args.private or None, exist_ok=True).repo_id
        operations = [CommitOperationAdd(file.name, file) for file in files]
        operations.append(CommitOperationAdd("README.md", str(card).encode()))  # the head's own file stays as it is
        commit = api.create_commit(repo, operations, commit_message="Upload a head of vllm_mtpc")
    except Exception as error:  # the client raises many kinds of errors; each becomes one line
        # For a file that was not taken, the client raises a RuntimeError whose cause is the HTTP error.
        reason = " ".join(str(error.__cause__ or error).split())
        raise UsageError(
            f"{args.repo} on {api.endpoint}: not uploaded ({reason}); check the connection, the name and that your "
            "token may write there; for a new token type: hf auth login"
        ) from None
    print(f"committed: {commit.commit_url}\nserve it with: vllm serve {repo}")
    return 0


def published_files(folder: Path) -> list[Path]:
    """Return the files of a head that are sent, without its card, the trainer's state and the user's files.

    Raises:
        UsageError: The folder holds no head.
    """
    from vllm_mtpc.checkpoint import load, locate, metadata

    if not locate.is_head(folder):
        raise UsageError(f"{folder} is no head's folder; name the folder that `vllm-mtpc train` or `convert` wrote")
    weights = (locate.WEIGHTS_FILE, locate.U_EMBED_FILE, *load.ADAPTER_FILES)
    names = (locate.CONFIG_FILE, *weights, locate.PROVENANCE_FILE, *metadata.PLOTS, "LICENSE", "NOTICE")
    return [folder / name for name in names if (folder / name).is_file()]


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
    import yaml
    from huggingface_hub import ModelCard

    from vllm_mtpc.checkpoint import metadata
    from vllm_mtpc.checkpoint.inspect import inspect_head
    from vllm_mtpc.checkpoint.load import read_config
    from vllm_mtpc.checkpoint.locate import CONFIG_FILE, hub_name

    report, config, file = inspect_head(folder), read_config(folder), folder / "README.md"
    target = hub_name(report["target"]["name_or_path"])
    if target is None:
        raise CheckpointError(
            f"{folder}: its target is the local folder {report['target']['name_or_path']!r}; put the target's name on "
            f"the hub, OWNER/NAME, into {CONFIG_FILE} (speculators_config.verifier.name_or_path)"
        )
    logging.getLogger("huggingface_hub.repocard").setLevel(logging.ERROR)  # it warns of a card without metadata
    try:
        text = f"# {report['method']} head, n={report['window']}\n\nA draft head for `{target}`.\n"
        card = ModelCard(file.read_text(encoding="utf-8") if file.is_file() else text, ignore_metadata_errors=True)
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
    kept = card.data.to_dict()
    for key in (*metadata.LICENSE_KEYS, "model-index"):
        kept.pop(key, None)
    tags = [*(kept["tags"] if isinstance(kept.get("tags"), list) else []), *metadata.tags_of(config)]
    card.data = type(own)(**kept | own.to_dict() | {"tags": list(dict.fromkeys(tags))})
    return card
