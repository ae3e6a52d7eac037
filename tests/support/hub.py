"""A fake hub: the endpoints of an upload and a download, with a record of the requests."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

TOKEN = "hf_of_a_test"
LARGE = (".safetensors", ".png")  # sent as LFS objects; everything else is in the commit itself
COMMIT = "c" * 40


@dataclass
class Hub:
    """State of the server: its files, the received ones, and the paths it refuses."""

    cards: dict[str, str] = field(default_factory=dict)  # README.md by repository
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)  # by name, by repository
    sizes: dict[str, int] = field(default_factory=dict)  # that it claims of files, by name
    refuse: dict[str, int] = field(default_factory=dict)  # HTTP status by the start of a path
    created: dict[str, dict] = field(default_factory=dict)  # requests to create a repository, by name
    objects: dict[str, bytes] = field(default_factory=dict)  # by SHA-256
    commits: list[dict[str, bytes]] = field(default_factory=list)  # files by name, of each commit
    asked: list[str] = field(default_factory=list)
    url: str = ""

    def answer(self, path: str, body: bytes) -> dict | None:
        """The answer to a POST; None where there is no such address."""
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        if path.endswith("/commit/main"):
            self.commits.append(self.files_of([json.loads(line) for line in body.splitlines()]))
            repo = path.removeprefix("/api/models/").removesuffix("/commit/main")
            return {"commitUrl": f"{self.url}/{repo}/commit/{COMMIT}", "commitOid": COMMIT}
        values = json.loads(body)
        if path == "/api/repos/create":
            name = f"{values['organization']}/{values['name']}"
            self.created[name] = values
            return {"url": f"{self.url}/{name}"}
        if path.endswith("/preupload/main"):
            modes = [(file["path"], "lfs" if file["path"].endswith(LARGE) else "regular") for file in values["files"]]
            return {"files": [{"path": name, "uploadMode": mode, "shouldIgnore": False} for name, mode in modes]}
        if path.endswith("/info/lfs/objects/batch"):
            upload = [
                one | {"actions": {"upload": {"href": f"{self.url}/lfs/{one['oid']}"}}} for one in values["objects"]
            ]
            return {"transfer": "basic", "objects": upload}
        return None

    def told(self, repo: str) -> list[dict]:
        """The files of a repository, as its tree lists them."""
        sizes = {name: self.sizes.get(name, len(data)) for name, data in self.files[repo].items()}
        return [{"type": "file", "path": name, "size": size, "oid": name} for name, size in sizes.items()]

    def files_of(self, lines: list[dict]) -> dict[str, bytes]:
        """Files by name, of the lines of a commit."""
        values = [(line["key"], line["value"]) for line in lines]
        plain = {value["path"]: base64.b64decode(value["content"]) for key, value in values if key == "file"}
        return plain | {value["path"]: self.objects[value["oid"]] for key, value in values if key == "lfsFile"}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def say(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def read(self) -> bytes | None:
        """Return the body of a request; None if it was refused."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.asked.append(f"{self.command} {self.path}")
        status = next((code for start, code in self.hub.refuse.items() if self.path.startswith(start)), None)
        signed = self.path.startswith("/lfs/") or self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if status or not signed:
            self.say(status or 401, json.dumps({"error": "refused"}).encode())
            return None
        return body

    def do_POST(self) -> None:
        if (body := self.read()) is not None:
            found = self.hub.answer(self.path, body)
            self.say(404 if found is None else 200, json.dumps(found or {}).encode(), Content_Type="application/json")

    def do_PUT(self) -> None:
        if (body := self.read()) is not None:
            self.hub.objects[hashlib.sha256(body).hexdigest()] = body
            self.say(200, b"")

    def do_GET(self) -> None:
        if self.read() is None:
            return
        for repo, files in self.hub.files.items():
            answers = {f"/api/models/{repo}/revision/main": {"id": repo, "sha": COMMIT}}
            answers[f"/api/models/{repo}/tree/{COMMIT}"] = self.hub.told(repo)
            if (answer := answers.get(self.path.partition("?")[0])) is not None:
                return self.say(200, json.dumps(answer).encode(), Content_Type="application/json")
            start, _, name = self.path[1:].partition("/resolve/")
            if start == repo and (name := name.partition("/")[2]) in files:
                size = self.hub.sizes.get(name, len(files[name]))
                return self.say(200, files[name], ETag=f'"{name}"', X_Repo_Commit=COMMIT, X_Linked_Size=str(size))
        card = self.hub.cards.get(self.path[1:].partition("/resolve/main/README.md")[0])
        etag = {"ETag": '"e"', "X_Repo_Commit": COMMIT}
        self.say(200, card.encode(), **etag) if card else self.say(404, b"", X_Error_Code="RepoNotFound")

    do_HEAD = do_GET

    def log_message(self, *args: object) -> None:
        """Keep stderr empty: `Hub.asked` has the requests."""


@contextmanager
def hub_server(home: Path) -> Iterator[Hub]:
    """Serve a hub that huggingface_hub takes for the hub in this process; the cache in `home` is empty."""
    hub = Hub()
    handler = type("HandlerOfOneHub", (Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {
                "ENDPOINT": hub.url,
                "HUGGINGFACE_CO_URL_TEMPLATE": hub.url + "/{repo_id}/resolve/{revision}/{filename}",
                "HF_HUB_CACHE": str(home / "cache"),
                "HF_TOKEN_PATH": str(home / "token"),
                "HF_HUB_OFFLINE": False,
                "HF_HUB_DISABLE_XET": True,
            }.items():
                patch.setattr(constants, name, value)
            patch.setenv("HF_TOKEN", TOKEN)
            yield hub
        server.shutdown()
