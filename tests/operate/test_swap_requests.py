"""What POST /mtpc/head does before the engine is asked: who may ask, and what it downloads. No engine runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from huggingface_hub import constants
from starlette.middleware.cors import CORSMiddleware
from starlette.testclient import TestClient

from tests.support.hub import COMMIT, TOKEN, Hub, hub_server
from vllm_mtpc import demo
from vllm_mtpc.proposers.config import engine_checks  # noqa: F401  vLLM's configuration before its entry points
from vllm_mtpc.proposers.patches.endpoint import PATH, HeadEndpoint

HEAD, TARGET = "someone/head", "someone/target"
KEY = "a-key"


class Swaps:
    """An endpoint, and what its engine was asked for."""

    def __init__(self, api_key: list[str] | None = None) -> None:
        self.asked: list[str] = []
        endpoint, app = HeadEndpoint(), FastAPI()
        app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])  # vLLM's
        endpoint.attach_router(app)
        endpoint.engine = self
        self.vllm_config = SimpleNamespace(speculative_config=SimpleNamespace(method="mtpc"))
        self.client = TestClient(app)
        if api_key:
            from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

            endpoint.guard = AuthenticationMiddleware(None, api_key)

    async def collective_rpc(self, name: str, args: tuple[str]) -> list[dict[str, str]]:
        assert name == "try_swap_head"
        self.asked.append(args[0])
        return [{"head": args[0]}]

    def post(self, path: str, **headers: str) -> tuple[int, str]:
        given = {"Content-Type": "application/json"} | {name.replace("_", "-"): text for name, text in headers.items()}
        answer = self.client.post(PATH, content=f'{{"path": "{path}"}}', headers=given)
        body: Any = answer.json()
        return answer.status_code, body["error"]["message"] if "error" in body else body["head"]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with a head and a target; the cache is empty."""
    with hub_server() as made:
        for name, value in {
            "ENDPOINT": made.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": made.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_HUB_OFFLINE": False,
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        for repo, name in ((HEAD, "btree"), (TARGET, "target")):
            made.files[repo] = {file.name: file.read_bytes() for file in demo.path(name).iterdir() if file.is_file()}
        yield made


def downloaded(hub: Hub) -> set[str]:
    return {line.rpartition("/")[2] for line in hub.asked if line.startswith("GET") and "/resolve/" in line}


def test_head_on_the_hub_is_downloaded_before_the_engine_is_asked(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once: offline the cached one is found."""
    swaps = Swaps()
    status, folder = swaps.post(HEAD)
    assert (status, swaps.asked) == (200, [folder])
    assert folder.endswith(f"/snapshots/{COMMIT}") and "model.safetensors" in downloaded(hub)
    assert Path(folder, "model.safetensors").read_bytes() == hub.files[HEAD]["model.safetensors"]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert Swaps().post(HEAD) == (200, folder)


@pytest.mark.parametrize(
    ("name", "sizes", "said"),
    [
        (TARGET, {}, "is no head"),
        (HEAD, {"model.safetensors": 60 << 30}, "has 60 GiB to download, allowed are 4"),
        ("someone/nothing", {}, "no head at 'someone/nothing'"),
    ],
)
def test_what_is_no_small_head_is_not_downloaded(hub: Hub, name: str, sizes: dict[str, int], said: str) -> None:
    hub.sizes |= sizes
    swaps = Swaps()
    status, message = swaps.post(name)
    assert status == 400 and said in message and "\n" not in message
    assert swaps.asked == [] and downloaded(hub) <= {"config.json"}


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_other_content_types_are_refused(kind: str) -> None:
    swaps = Swaps()
    status, message = swaps.post(str(demo.path("cp")), Content_Type=kind)
    assert status == 415 and "Content-Type: application/json" in message and swaps.asked == []
    assert swaps.post(str(demo.path("cp")), Content_Type="application/json; charset=utf-8")[0] == 200


def test_web_page_cannot_swap_without_the_key() -> None:
    """vLLM's CORS answers every page's preflight, so the content type alone keeps no page out."""
    page = "http://elsewhere.example"
    asking = {"Origin": page, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    swaps = Swaps()
    assert swaps.client.options(PATH, headers=asking).status_code == 200
    assert swaps.post(str(demo.path("cp")), Origin=page)[0] == 403 and swaps.asked == []
    keyed = Swaps([KEY])
    assert keyed.client.post(PATH, json={"path": "x"}, headers={"Origin": page}).status_code == 401
    assert keyed.post(str(demo.path("cp")), Origin=page, Authorization=f"Bearer {KEY}")[0] == 200


def test_workers_download_nothing(hub: Hub) -> None:
    from vllm_mtpc.errors import ServeConfigError
    from vllm_mtpc.proposers.heads.swap import swap

    config = SimpleNamespace(speculative_config=SimpleNamespace(model_folder="old"), use_v2_model_runner=True)
    with pytest.raises(ServeConfigError, match=r"resolve_head\('someone/head'\) downloads"):
        swap(SimpleNamespace(vllm_config=config, speculator=None), HEAD)
    assert hub.asked == []
