"""`vllm-mtpc push`: upload the files of a checked head and its model card to the hub, in one commit."""

from __future__ import annotations

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

    card = complete_card(args.folder, args.license, is_online=not args.dry_run)
    files = published_files(args.folder)
    for file in files:
        print(f"{file.stat().st_size:>15,}  {file.name}")
    print(f"README.md with the metadata:\n{card.data.to_yaml()}")
    if card.data.get("license") is None:
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
    except Exception as error:  # of many kinds; that of a refused file has the HTTP error as its cause
        reason = " ".join(str(error.__cause__ or error).split())
        raise UsageError(
            f"{args.repo} on {api.endpoint}: not uploaded ({reason}); check the connection, the name and that your "
            "token may write there; for a new token type: hf auth login"
        ) from None
    print(f"committed: {commit.commit_url}\nserve it with: vllm serve {repo}")
    return 0


def published_files(folder: Path) -> list[Path]:
    """Return the files of a head that are sent, without its card, the trainer's state and the user's files."""
    from vllm_mtpc.checkpoint import load, locate, metadata

    weights = (locate.WEIGHTS_FILE, locate.U_EMBED_FILE, *load.ADAPTER_FILES)
    names = (locate.CONFIG_FILE, *weights, locate.PROVENANCE_FILE, *metadata.PLOTS, "LICENSE", "NOTICE")
    return [folder / name for name in names if (folder / name).is_file()]


def complete_card(folder: Path, license: str | None, is_online: bool) -> ModelCard:
    """Return the folder's card with licence, target and tags of the head; other metadata of its author is kept.

    Args:
        folder: The head. Every tensor is checked.
        license: Licence of the head; None: that of its card, else that of its target.
        is_online: Whether the target's card is looked up on the hub.

    Raises:
        CheckpointError: The head cannot be loaded, its target is a local folder, or its README.md cannot be read.
    """
    from huggingface_hub import ModelCard

    from vllm_mtpc.checkpoint import check_tensors, locate, metadata, read_config

    config, file = read_config(folder), folder / "README.md"
    check_tensors(folder, config)
    name = config.speculators_config.verifier.name_or_path
    target = locate.hub_name(name)
    if target is None:
        raise CheckpointError(
            f"{folder}: its target is the local folder {name!r}; put the target's name on the hub, OWNER/NAME, into "
            f"{locate.CONFIG_FILE} (speculators_config.verifier.name_or_path)"
        )
    try:
        text = file.read_text(encoding="utf-8") if file.is_file() else f"A draft head for `{target}`.\n"
        card = ModelCard(text, ignore_metadata_errors=True)
    except Exception as error:  # of the file system, YAML and the hub's client
        raise CheckpointError(f"{file}: cannot be read ({first_line(error)}); fix or delete it") from None
    terms = {"license": license} if license else metadata.license_of(file) or metadata.target_license(target, is_online)
    tags = list(dict.fromkeys([*(card.data.get("tags") or []), *metadata.tags_of(config)]))
    found = dict.fromkeys(metadata.LICENSE_KEYS) | metadata.card_data(tags, target, terms).to_dict()
    for key, value in found.items():
        card.data[key] = value
    return card
