"""`vllm-mtpc push`: upload a checked head folder with a complete model card to the hub, in one commit."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_mtpc.checkpoint.locate import HUB_NAME
from vllm_mtpc.errors import UsageError

if TYPE_CHECKING:
    import argparse

    from huggingface_hub import ModelCard

CARD = "README.md"
LOGIN = "type: hf auth login"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=Path, metavar="FOLDER", help="the head")
    add("repo", metavar="OWNER/NAME", help="its repository on the hub, created if it does not exist")
    add("--license", metavar="ID", help="the head's licence, as apache-2.0 (default: its card's, else its target's)")
    add("--private", action="store_true", help="create the repository as a private one")
    add("--dry-run", action="store_true", help="check and list the files and send nothing; needs no network")


def run(args: argparse.Namespace) -> int:
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(args.repo)
        is_name = HUB_NAME.fullmatch(args.repo) is not None
    except HFValidationError:
        is_name = False
    if not is_name:
        raise UsageError(
            f"{args.repo!r} is no name of a repository; allowed: OWNER/NAME of letters, digits, '-', '_' and '.', at "
            "most 96 characters; correct it"
        )
    if not args.dry_run and get_token() is None:
        raise UsageError(f"no token of the hub is on this machine; {LOGIN}")
    from vllm_mtpc.publish.head_card import complete_card, published_files  # imports torch

    files = published_files(args.folder)
    card = complete_card(args.folder, args.repo, args.license, is_online=not args.dry_run)
    _print_files(args.folder, files, card)
    if args.dry_run:
        print(f"nothing was sent; without --dry-run it goes to {args.repo}")
        return 0
    print(f"committed: {_upload(files, card, args.repo, args.private)}")
    print(f"serve it with: vllm serve {args.repo}")
    return 0


def _print_files(folder: Path, files: list[Path], card: ModelCard) -> None:
    sizes = {CARD: len(str(card).encode())} | {file.name: file.stat().st_size for file in files}
    for name, size in sizes.items():
        print(f"{size:>15,}  {name}")
    print(f"{sum(sizes.values()):>15,}  bytes in {len(sizes)} files")
    left = sorted(path.name + "/" * path.is_dir() for path in folder.iterdir() if path.name not in sizes)
    if left:
        print(f"left out: {', '.join(left)}")
    print(f"metadata of {CARD}:")
    print("\n".join(f"  {line}" for line in card.data.to_yaml().splitlines()))
    if "license" not in card.data.to_dict():
        print("hint: no licence, so others may not use the head; name one with --license (the target's may bind it)")


def _upload(files: list[Path], card: ModelCard, repo: str, private: bool) -> str:
    """Create the repository if it does not exist and commit all files; return the commit's URL."""
    from huggingface_hub import HfApi

    api = HfApi(library_name="vllm_mtpc")
    try:
        api.create_repo(repo, private=private or None, exist_ok=True)
        with tempfile.TemporaryDirectory() as staging:  # the head's own README.md stays as it is
            for file in files:
                (Path(staging) / file.name).symlink_to(file.resolve())
            (Path(staging) / CARD).write_text(str(card), encoding="utf-8")
            message = "Upload a head of vllm_mtpc"
            return str(api.upload_folder(repo_id=repo, folder_path=staging, commit_message=message).commit_url)
    except Exception as error:  # the client raises many kinds of errors; each becomes one line
        raise UsageError(f"{repo}: {_explain(error, repo, api.endpoint)}") from None


def _explain(error: Exception, repo: str, endpoint: str) -> str:
    from huggingface_hub.errors import HfHubHTTPError

    # For a file that was not taken, the client raises a RuntimeError whose cause is the HTTP error.
    reason = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
    text = re.sub(r"\s+", " ", str(reason)) or type(reason).__name__
    if isinstance(reason, ValueError):
        return f"the hub does not accept it ({text}); correct README.md or --license"
    if not isinstance(reason, HfHubHTTPError):
        return f"no connection to {endpoint} ({text}); try again when there is one"
    owner, status = repo.partition("/")[0], reason.response.status_code
    remedies = {
        401: f"the hub does not accept the token; {LOGIN}",
        403: f"the token may not write there; name an OWNER of yours in place of {owner}, or {LOGIN}",
        404: f"the hub has no such place; check that {owner} exists and that the token may write there",
    }
    return f"{remedies.get(status, f'the hub refuses it ({text}); correct that')} (HTTP {status})"
