"""`vllm-mtpc push`: a head's folder to a repository on the hub, as one commit, when all of it has been checked."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_mtpc.checkpoint.locate import HUB_NAME
from vllm_mtpc.errors import UsageError

if TYPE_CHECKING:
    import argparse

    from vllm_mtpc.publish.folder import Upload

LOGIN = "type: hf auth login"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=Path, metavar="FOLDER", help="the head")
    add("repo", metavar="OWNER/NAME", help="its repository on the hub, which is created where there is none")
    add("--license", metavar="ID", help="the head's licence, as apache-2.0 (default: its card's, else its target's)")
    add("--private", action="store_true", help="create the repository as a private one")
    add("--dry-run", action="store_true", help="check and list what would be sent, and send nothing; needs no network")


def run(args: argparse.Namespace) -> int:
    _check_repo(args.repo)
    if not args.dry_run:
        _check_token()
    from vllm_mtpc.publish.folder import gather  # torch: not before the names are known to be good

    upload = gather(args.folder, args.repo, args.license, is_online=not args.dry_run)
    _show(upload)
    if args.dry_run:
        print(f"nothing was sent; without --dry-run it goes to {args.repo}")
        return 0
    print(f"committed: {send(upload, args.repo, args.private)}")
    print(f"serve it with: vllm serve {args.repo}")
    return 0


def _check_repo(repo: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
        is_name = HUB_NAME.fullmatch(repo) is not None
    except HFValidationError:
        is_name = False
    if not is_name:
        raise UsageError(
            f"{repo!r} is no name of a repository; allowed: OWNER/NAME of letters, digits, '-', '_' and '.', at most "
            "96 characters; correct it"
        )


def _check_token() -> None:
    from huggingface_hub import get_token

    if get_token() is None:
        raise UsageError(f"no token of the hub is on this machine; {LOGIN}")


def _show(upload: Upload) -> None:
    """The files with their sizes, what stays behind, and the card's metadata."""
    sizes = upload.sizes
    for name, size in sizes.items():
        print(f"{size:>15,}  {name}")
    print(f"{sum(sizes.values()):>15,}  bytes in {len(sizes)} files")
    if upload.left:
        print(f"left out: {', '.join(upload.left)}")
    print(f"metadata of {next(iter(sizes))}:")
    print("\n".join(f"  {line}" for line in upload.card.data.to_yaml().splitlines()))
    if "license" not in upload.card.data.to_dict():
        print("hint: no licence, so nobody may use the head; name one with --license (the target's own may bind it)")


def send(upload: Upload, repo: str, private: bool) -> str:
    """Create the repository where there is none and commit everything at once; the commit's address.

    Raises UsageError for what the hub or the way to it refuses. The hub's client draws the progress.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    from vllm_mtpc.publish.folder import CARD

    api = HfApi(library_name="vllm_mtpc")
    operations = [CommitOperationAdd(file.name, file) for file in upload.files]
    operations.append(CommitOperationAdd(CARD, str(upload.card).encode()))
    try:
        api.create_repo(repo, private=private or None, exist_ok=True)
        return str(api.create_commit(repo, operations, commit_message="Upload a head of vllm_mtpc").commit_url)
    except Exception as error:  # the hub's client raises many kinds; a user needs one line whatever happened
        raise UsageError(f"{repo}: {_refusal(error, repo, api.endpoint)}") from None


def _refusal(error: Exception, repo: str, endpoint: str) -> str:
    """What the hub, or the way to it, has against it, and what to do."""
    from huggingface_hub.errors import HfHubHTTPError

    # The client tells of a file that was not taken by a RuntimeError, and of the reason by its cause.
    reason = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
    said = re.sub(r"\s+", " ", str(reason)) or type(reason).__name__
    if isinstance(reason, ValueError):
        return f"the hub does not take it ({said}); correct README.md or --license"
    if not isinstance(reason, HfHubHTTPError):
        return f"no connection to {endpoint} ({said}); type the same again when there is one"
    owner, status = repo.partition("/")[0], reason.response.status_code
    remedies = {
        401: f"the hub does not know the token; {LOGIN}",
        403: f"the token may not write there; name an OWNER of yours in place of {owner}, or {LOGIN}, with a token "
        "that may write",
        404: f"the hub has no such place; see that {owner} exists and that the token may write there",
    }
    return f"{remedies.get(status, f'the hub refuses it ({said}); correct that')} (HTTP {status})"
