"""The status page without a browser: its files and headers, and the figures and the tree that it asks for."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Coroutine
from functools import partial
from hashlib import blake2b
from http import HTTPStatus
from typing import Any, TypeVar

import pytest

from kvcached.core.eviction.reuse import SIZE_RATIOS
from kvcached.core.insight.picture import Bounds, draw
from kvcached.monitoring import pages as pages_module
from kvcached.monitoring.assets import load_assets
from kvcached.server.http import Page
from kvcached.service import report_verbs
from kvcached_client.protocol import engine as wire
from tests.monitoring.registry import SLABS, pages_of
from tests.service.office import SLAB_BYTES, FakePeer, Office, key_chain

T = TypeVar("T")
#: All that a browser loads; it is a page, not an application.
PAGE_BYTES_MAX = 100 * 1024


@pytest.fixture
def office() -> Office:
    office = Office("a", host_slabs=SLABS)
    office.enter(FakePeer(1))
    office.store(key_chain(3) + key_chain(4, seed=1))
    office.store(key_chain(3) + key_chain(2, seed=2))
    return office


def run(main: Coroutine[None, None, T]) -> T:
    return asyncio.run(main)


def get(office: Office, path: str) -> Page:
    return run(pages_of(office).get(path, ""))


def read(office: Office, path: str) -> Any:
    return json.loads(get(office, path).body)


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "content_type"),
    [
        ("/", "text/html; charset=utf-8"),
        ("/page/style.css", "text/css; charset=utf-8"),
        ("/page/main.js", "text/javascript; charset=utf-8"),
        ("/page/icon.svg", "image/svg+xml"),
    ],
)
def test_page_is_served_with_a_strict_policy(path: str, content_type: str, office: Office) -> None:
    """Each file has its type, and forbids a browser everything but this page's own files and figures."""
    page = get(office, path)
    policy = dict(page.headers)["content-security-policy"]

    assert (page.status, page.content_type) == (HTTPStatus.OK, content_type)
    rules = {rule.split()[0]: rule.split()[1:] for rule in policy.split(";")}
    assert rules["default-src"] == rules["frame-ancestors"] == rules["base-uri"] == rules["form-action"] == ["'none'"]
    assert {source for rule in rules.values() for source in rule} == {"'none'", "'self'", "'script'"}
    assert rules["require-trusted-types-for"] == ["'script'"]


def test_page_asks_nobody_else_and_has_nothing_inline() -> None:
    """No file names another place, and the page has no script, style or handler of its own."""
    assets = load_assets()
    for path, page in assets.items():
        text = page.body.decode()
        assert re.findall(r"(?:https?:)?//[\w.]+\.\w+/?", text.replace("http://www.w3.org/2000/svg", "")) == [], path
        assert re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|Function\(", text) == [], path
    html = assets["/"].body.decode()
    assert re.findall(r"<style|\sstyle=|\son\w+=|javascript:", html) == []
    assert all(tag.startswith("<script type=") and "src=" in tag for tag in re.findall(r"<script[^>]*>", html))
    assert sum(len(page.body) for page in assets.values()) < PAGE_BYTES_MAX


def test_files_that_the_page_asks_for_are_there() -> None:
    """What the page and its scripts name is served, relative to them: the page also works below a path of a proxy."""
    assets = load_assets()
    named = re.findall(r'(?:src|href)="([^"]+)"', assets["/"].body.decode())
    assert {f"/{name}" for name in named} == {"/page/icon.svg", "/page/style.css", "/page/main.js"}
    imported = {
        name
        for path, page in assets.items()
        if path.endswith(".js")
        for name in re.findall(r'from "\./([^"]+)"', page.body.decode())
    }
    assert {f"/page/{name}" for name in imported} == {
        path for path in assets if path.endswith(".js") and path != "/page/main.js"
    }
    main = assets["/page/main.js"].body.decode()
    assert '"status.json"' in main
    assert '"tree.json"' in main


# --- figures ----------------------------------------------------------------------------------------------------------


def test_status_tells_what_the_page_shows(office: Office) -> None:
    """Beside the statistics, /status.json has the replicas, the host pool, storage, durations and copies."""
    office.workers["a"].end_all()
    status = read(office, "/status.json")

    (session,) = status["session_list"]
    assert (session["where"], session["state"], session["leases"], session["set_aside"]) == ("a", "active", 0, 0)
    (replica,) = status["replicas"]
    assert (replica["name"], replica["model"], replica["shards"], replica["block_size"]) == ("a", "tiny", 2, 4)
    assert status["host_pool"]["slabs"] == SLABS
    assert status["storage"] is None
    acquire = next(each for each in status["requests"] if each["verb"] == "acquire")
    assert sum(acquire["counts"]) == 2
    assert len(acquire["counts"]) == len(status["request_bounds_s"]) + 1
    assert acquire["seconds"] > 0
    stored = next(each for each in status["copies"] if (each["executor"], each["kind"]) == ("worker", "store"))
    assert stored["ended"] > 0
    assert stored["copied_bytes"] == 9 * replica["block_bytes"]
    assert all(each["in_flight"] == 0 for each in status["copies"])


def test_status_has_estimates_of_other_sizes() -> None:
    """Pairs of a size, as a multiple of the host pool's, and the part of the blocks asked for that it would hit."""
    office = Office("a", host_slabs=SLABS, spaces=1)
    office.enter(FakePeer(1))
    prompts = [hashed_chain(8, seed) for seed in range(120)]
    for keys in prompts * 20:
        office.store(keys)
        office.workers["a"].end_all()
    status = read(office, "/status.json")
    (host,) = status["hosts"]
    sizes, hits = zip(*host["hit_estimates"], strict=True)

    assert status["host_pool_bytes"] == SLABS * SLAB_BYTES
    assert host["asked_blocks"] == 8 * 120 * 20
    assert sizes == SIZE_RATIOS
    assert hits == tuple(sorted(hits))


def hashed_chain(blocks: int, seed: int) -> bytes:
    """Keys as engines make them: samples are chosen by their bits."""
    return b"".join(blake2b(key_chain(1, seed) + bytes([block]), digest_size=16).digest() for block in range(blocks))


@pytest.mark.parametrize(("path", "limit"), [("/status.json", "STATUS_S_MIN"), ("/tree.json", "TREE_S_MIN")])
def test_answers_are_shared(path: str, limit: str, office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many pages are open, an answer is made once in a time; and after that anew."""

    async def main() -> tuple[bytes, bytes]:
        pages = pages_of(office)
        first = await pages.get(path, "")
        office.store(key_chain(2, seed=3))
        others = await asyncio.gather(*(pages.get(path, "") for _ in range(20)))
        assert {page.body for page in others} == {first.body}
        return first.body, (await pages.get(path, "")).body

    before, after = run(main())
    assert before == after
    monkeypatch.setattr(pages_module, limit, 0.0)

    async def hurried() -> tuple[bytes, bytes]:
        pages = pages_of(office)
        first = await pages.get(path, "")
        office.store(key_chain(2, seed=4))
        return first.body, (await pages.get(path, "")).body

    before, after = run(hurried())
    assert before != after


# --- the tree ---------------------------------------------------------------------------------------------------------


def test_tree_shows_runs_with_their_copies(office: Office) -> None:
    """Each run stands behind the one that it continues, with its length, its copies and what is below it."""
    office.workers["a"].end_all()
    (tree,) = read(office, "/tree.json")["trees"]

    assert (tree["namespace"], tree["replicas"], tree["pools"]) == ((b"n" * 8).hex(), ["a"], ["a", "host"])
    assert (tree["runs"], tree["looked"], tree["chains"], tree["blocks"]) == (3, 3, 1, 9)
    shown = [(run["above"], run["start"], run["blocks"], run["below"], run["children"]) for run in tree["shown"]]
    assert shown == [(-1, 0, 3, 6, 2), (0, 3, 4, 0, 0), (0, 3, 2, 0, 0)]
    assert [run["held"] for run in tree["shown"]] == [{"a": 3, "host": 3}, {"a": 4, "host": 4}, {"a": 2, "host": 2}]


def test_tree_shows_no_key(office: Office) -> None:
    """Blocks have names: who has one can inspect the block, and cannot acquire it."""
    page = get(office, "/tree.json")
    keys = key_chain(3) + key_chain(4, seed=1) + key_chain(2, seed=2)

    assert not [at for at in range(0, len(keys), 16) if keys[at : at + 16].hex().encode() in page.body]
    name = json.loads(page.body)["trees"][0]["shown"][0]["name"]
    report = office.expect(wire.InspectReport, wire.Inspect(id=office.next_id(), key=bytes.fromhex(name)))
    assert (report.found, report.depth) == (True, 0)


def test_engines_get_a_turn_while_the_tree_is_drawn(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two steps of the picture, the event loop serves whoever has asked something."""
    monkeypatch.setattr(report_verbs, "draw", partial(draw, bounds=Bounds(per_step=1)))

    async def main() -> int:
        page = asyncio.create_task(pages_of(office).get("/tree.json", ""))
        turns = 0
        while not page.done():
            await asyncio.sleep(0)
            turns += 1
        return turns

    assert run(main()) > 6
