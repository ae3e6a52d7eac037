"""`vllm-mtpc push`: upload a checked head folder with a complete model card to the hub, in one commit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vllm_mtpc.errors import UsageError

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=Path, metavar="FOLDER", help="the head")
    add("repo", metavar="OWNER/NAME", help="its repository on the hub, created if it does not exist")
    add("--license", metavar="ID", help="the head's licence, as apache-2.0 (default: its card's, else its target's)")
    add("--private", action="store_true", help="create the repository as a private one")
    add("--dry-run", action="store_true", help="check and list the files and send nothing; needs no network")


def run(args: argparse.Namespace) -> int:
    from huggingface_hub import CommitOperationAdd, HfApi

    from vllm_mtpc.publish.head_card import complete_card, published_files  # imports torch

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
