"""The status page in a real browser, of a real daemon with blocks."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from kvcached_client import Client
from tests.browser.browser import CHROMIUM, DRIVER, chromium, console, prefer, requested, resize
from tests.browser.scene import HOSTILE, SLOTS, Conversations, Scene, offload_engine, scene, wait_at_rest

pytestmark = pytest.mark.skipif(
    (CHROMIUM is None or DRIVER is None) and "CI" not in os.environ,  # where it is missing by mistake
    reason="there is no Chromium: on Debian and Ubuntu, apt-get install chromium chromium-driver",
)

T = TypeVar("T")
PATIENCE_S = 20
DESKTOP = (1280, 900)
#: The narrowest phone that is sold.
PHONE = (320, 568)
#: Of text, by WCAG 2.2, level AA.
CONTRAST_MIN = 4.5


class Shown(NamedTuple):
    """A page in a browser."""

    scene: Scene
    driver: webdriver.Chrome

    def until(self, found: Callable[[], T]) -> T:
        """What is found once it is there."""
        return WebDriverWait(self.driver, PATIENCE_S, poll_frequency=0.05).until(lambda _: found())

    def open(self) -> None:
        """Load the page, and wait for its first figures and its first picture."""
        self.driver.get(self.scene.url)
        self.until(lambda: self.text("link") == "live" and self.boxes())

    def text(self, name: str) -> str:
        return self.driver.find_element(By.ID, name).text

    def boxes(self) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, "#tree .box")

    def heads(self, table: str) -> list[str]:
        """The titles of a table's columns."""
        return [each.text for each in self.driver.find_elements(By.CSS_SELECTOR, f"#{table} th")]

    def rows(self, table: str) -> list[list[str]]:
        """The cells of a table."""
        found = self.driver.find_elements(By.CSS_SELECTOR, f"#{table} tbody tr")
        return [[cell.text for cell in row.find_elements(By.TAG_NAME, "td")] for row in found]

    def crumbs(self) -> list[str]:
        return [each.text for each in self.driver.find_elements(By.CSS_SELECTOR, "#crumbs .crumb")]

    def focused(self) -> str:
        return str(self.driver.switch_to.active_element.get_attribute("aria-label"))

    def press(self, *keys: str) -> None:
        for key in keys:
            self.driver.switch_to.active_element.send_keys(key)

    def run(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("page")


@pytest.fixture(scope="module")
def at_rest(place: Path) -> Iterator[Shown]:
    """A daemon whose engines have stopped asking, with blocks in all tiers, and a browser."""
    with ExitStack() as stack:
        shown_scene = stack.enter_context(scene(place))
        daemon = shown_scene.daemon
        stack.enter_context(offload_engine(daemon))
        client = stack.enter_context(Client.connect(daemon.run_dir, replica="chat", deadline_ms=10_000))
        talks = Conversations(client)
        for _ in range(250):
            talks.turn()
        wait_at_rest(daemon)
        yield Shown(shown_scene, stack.enter_context(chromium(place / "profile")))


@pytest.fixture
def page(at_rest: Shown) -> Iterator[Shown]:
    """The page, open on a desktop. Whatever a test does there, the console stays empty and nobody else is asked."""
    resize(at_rest.driver, *DESKTOP)
    prefer(at_rest.driver, "light")
    at_rest.open()
    yield at_rest
    assert console(at_rest.driver) == []
    assert {url for url in requested(at_rest.driver) if not url.startswith(at_rest.scene.url)} == set()


def status(shown: Shown, path: str = "status.json") -> Any:
    with urllib.request.urlopen(f"{shown.scene.url}{path}", timeout=PATIENCE_S) as answer:  # noqa: S310 - of the daemon
        return json.load(answer)


def percent(share: float) -> str:
    """A share as the page writes it: with a decimal below 10 percent, halves upwards as JavaScript rounds."""
    points = Decimal(100 * share)
    unit = Decimal("0.1") if 0 < share < 0.0995 else Decimal(1)
    return f"{points.quantize(unit, ROUND_HALF_UP)}%"


def blocks_in_storage(shown: Shown) -> int:
    (blocks,) = [row[1] for row in shown.rows("storage") if row[0] == "blocks"]
    return int(blocks.replace(",", ""))


def test_page_shows_the_figures_of_the_status(page: Shown) -> None:
    """State, hits, sessions, leases, pools, workers and storage are what /status.json says."""
    told = status(page)
    (pool,), counters = told["pools"], told["counters"]
    in_host = sum(host["states"]["cached"] for host in told["hosts"])
    unloaded = counters.get("load_below_threshold_blocks", 0) + counters.get("load_over_quota_blocks", 0)
    hits = counters["hit_blocks"] + counters.get("host_hit_blocks", 0) - unloaded

    assert page.text("state") == "serving"
    assert page.text("facts").startswith(f"{told['version']} · up ")
    assert page.text("sessions") == "2"
    assert page.text("leases-words") == "5 leases"
    assert page.text("cached").replace(",", "") == str(told["cached_blocks"] + in_host)
    assert page.text("hit-rate") == percent(hits / (hits + counters["missed_blocks"]))
    memory = {row[0]: row for row in page.rows("tiers")}
    assert memory["device of chat"][3:6] == [f"{SLOTS}", f"{pool['states']['free']}", f"{pool['states']['cached']}"]
    assert page.rows("workers") == [["chat", "tiny-chat", "cpu", "1", "healthy", "0"]]
    assert page.rows("sessions-table")[0][:3] == ["replica chat", str(pool["session"]), "3"]
    storage = {row[0]: row[1] for row in page.rows("storage")}
    assert (storage["backend"], storage["state"]) == ("disk", "ready")
    page.until(lambda: blocks_in_storage(page) == status(page)["storage"]["blocks"])  # the last ones are being written
    assert "acquire" in {row[0] for row in page.rows("requests")}
    assert any(row[0] == "device to host pool, by workers" for row in page.rows("copies"))
    assert page.driver.find_elements(By.CSS_SELECTOR, "#charts svg path.line, #charts svg path.area")


def test_blocks_that_are_not_loaded_are_no_hits(page: Shown) -> None:
    """Blocks of the host pool that were computed instead of loaded are missed, and nothing else."""
    unloaded = {"load_below_threshold_blocks": 3, "load_over_quota_blocks": 1}
    counters = {"hit_blocks": 2, "host_hit_blocks": 6, "missed_blocks": 6, **unloaded}
    script = """
        const [counters, done] = arguments;
        import("/page/history.js").then((page) => done(page.hits({ counters: {} }, { counters })));
    """

    shares = page.driver.execute_async_script(script, counters)

    assert shares == {"device": 0.2, "host": 0.2, "missed": 0.6, "rate": 0.4}


def test_sizes_are_the_estimates_of_the_status(page: Shown) -> None:
    """Each namespace has a row with the hits of every size, and a line if there are estimates for it."""
    told = status(page)
    chat, other = sorted(told["hosts"], key=lambda host: int(host["asked_blocks"]), reverse=True)
    sizes = [f"{ratio * told['host_pool_bytes'] / 1024:.0f} KiB" for ratio, _ in chat["hit_estimates"][:4]]
    heads = page.heads("sizes")
    hits = [percent(hit) for _, hit in chat["hit_estimates"]]

    assert (heads[0], heads[1:5]) == ("namespace", [*sizes[:3], f"{sizes[3]} now"])
    assert page.rows("sizes") == [
        ["chat", *hits, f"{chat['asked_blocks']:,}"],
        [HOSTILE, *["\N{EN DASH}"] * len(hits), f"{other['asked_blocks']}"],
    ]
    assert page.text("sizes-legend") == f"chat {hits[3]} now"
    assert page.text("sizes-words").startswith("chat: ")
    assert len(page.driver.find_elements(By.CSS_SELECTOR, "#sizes-plot path.line:not(.dots)")) == 1


@pytest.mark.parametrize(
    ("hits", "words"),
    [
        ((0.31, 0.45, 0.516, 0.534, 0.534), "192 GiB would hit 53%, 8 points more than 64.0 GiB, the size now."),
        ((0.31, 0.45, 0.454, 0.456, 0.46), "192 GiB would hit 46%, 1 point more than 64.0 GiB, the size now."),
        ((0.31, 0.45, 0.45, 0.452, 0.454), "256 GiB would hit 45%, no more than 64.0 GiB, the size now."),
    ],
)
def test_largest_gain_is_said_in_words(hits: tuple[float, ...], words: str, page: Shown) -> None:
    """The namespace that is asked for most: the smallest of the sizes that hit most, and how many points more.

    The columns have the sizes of the latest answer: the next daemon may have another host pool.
    """
    hosts = [a_host("seldom", 10, [0.0, 0.0, 0.0, 0.0, 1.0]), a_host("often", 20, hits)]
    pretend(page, host_pool_bytes=64 << 30, hosts=hosts)
    page.until(lambda: page.text("sizes-words") == f"often: {words}")
    assert page.heads("sizes")[1:-1] == ["32.0 GiB", "64.0 GiB now", "128 GiB", "192 GiB", "256 GiB"]


@pytest.mark.parametrize(
    ("pool_bytes", "labels", "words"),
    [
        (0, [], "has no host pool"),
        (1 << 30, [], "No engine has used"),
        (1 << 30, ["new"], "Too few blocks were sampled"),
    ],
)
def test_without_estimates_the_page_says_why(pool_bytes: int, labels: list[str], words: str, page: Shown) -> None:
    """In place of lines and a table without figures there is a sentence."""
    assert page.driver.find_element(By.ID, "sizes").is_displayed()
    pretend(page, host_pool_bytes=pool_bytes, hosts=[a_host(label, 10, []) for label in labels])
    page.until(lambda: words in page.text("sizes-words"))
    for name in ("sizes-shown", "sizes-legend"):
        assert not page.driver.find_element(By.ID, name).is_displayed()


def test_many_namespaces_have_few_lines_and_all_rows(page: Shown) -> None:
    """The five namespaces that are asked for most have lines; on a phone their names, however long, fit."""
    resize(page.driver, *PHONE, is_phone=True)
    names = [f"{place}{'n' * 60}" for place in range(7)]
    pretend(page, hosts=[a_host(name, place, [0.1, 0.2, 0.3, 0.4, 0.5]) for place, name in enumerate(names)])
    page.until(lambda: page.text("sizes-legend").endswith("2 more in the table"))
    legend = page.text("sizes-legend").splitlines()

    assert [row[0] for row in page.rows("sizes")] == names
    assert legend == [*(f"{name} 20% now" for name in names[2:]), "2 more in the table"]
    assert len(page.driver.find_elements(By.CSS_SELECTOR, "#sizes-plot path.line:not(.dots)")) == len(names) - 2
    assert beyond(page) == []


def a_host(label: str, asked_blocks: int, hits: Sequence[float]) -> dict[str, object]:
    """A namespace as /status.json has it, with the hits of pools of half to four times the size, or of none."""
    told: dict[str, object] = {"label": label, "replicas": [], "asked_blocks": asked_blocks, "leases": 0, "pinned": 0}
    estimates = list(zip((0.5, 1.0, 2.0, 3.0, 4.0), hits, strict=False))
    return told | {"hit_estimates": estimates, "slots": 8, "states": {"free": 8}}


def pretend(page: Shown, **fields: object) -> None:
    """From the next answer on, let the page read these fields in /status.json."""
    page.run(
        """
        const original = window.fetch;
        window.fetch = async (...all) => {
            const answer = await original(...all);
            if (String(all[0]) !== "status.json") return answer;
            return new Response(JSON.stringify({...await answer.json(), ...arguments[0]}));
        };
        """,
        fields,
    )


def test_names_of_peers_are_text(page: Shown) -> None:
    """A namespace whose name is HTML is shown by this name, in the tables and in the tree, and nothing of it runs."""
    assert f"namespace {HOSTILE}" in {row[0] for row in page.rows("sessions-table")}
    assert any(HOSTILE in str(box.get_attribute("aria-label")) for box in page.boxes())
    assert page.driver.title == "kvcached"
    assert page.driver.find_elements(By.CSS_SELECTOR, "img, main b, iframe, script:not([src])") == []


def test_tree_zooms_by_keyboard(page: Shown) -> None:
    """Arrow keys move between boxes, Enter zooms in, Escape zooms out one level, Home shows all."""
    page.run("document.querySelector('#tree [tabindex=\"0\"]').focus()")
    assert page.focused().startswith("All namespaces")
    page.press(Keys.ARROW_DOWN)
    assert page.focused().startswith("Namespace chat")
    page.press(Keys.ARROW_DOWN, Keys.ARROW_RIGHT)
    second = page.focused()
    page.press(Keys.ARROW_LEFT, Keys.ARROW_RIGHT)
    assert page.focused() == second
    assert page.text("tree-detail") == second
    page.press(Keys.ENTER)
    assert len(page.crumbs()) == 3
    widths = {box.get_attribute("aria-label"): box.size["width"] for box in page.boxes()}
    assert widths[second] == pytest.approx(page.driver.find_element(By.ID, "tree").size["width"], abs=2)
    page.press(Keys.ESCAPE)
    assert page.crumbs() == ["all namespaces", "chat"]
    page.press(Keys.ENTER, Keys.HOME)
    assert page.crumbs() == ["all namespaces"]
    assert page.focused().startswith("All namespaces")


def test_tree_zooms_by_click_and_stays_there(page: Shown) -> None:
    """A click zooms in, and the next pictures keep the place and the focus; the path above leads back."""
    chat = next(box for box in page.boxes() if str(box.get_attribute("aria-label")).startswith("Namespace chat"))
    chat.click()
    assert page.crumbs() == ["all namespaces", "chat"]
    page.driver.execute_async_script("""
        const told = arguments[0], original = window.fetch;
        window.fetch = async (...all) => {
            const answer = await original(...all);
            if (String(all[0]) === "tree.json") setTimeout(told, 100);
            return answer;
        };
    """)
    assert page.crumbs() == ["all namespaces", "chat"]
    assert page.focused().startswith("Namespace chat")
    page.driver.find_element(By.CSS_SELECTOR, "#crumbs button").click()
    assert page.crumbs() == ["all namespaces"]


def test_tree_has_the_runs_of_the_picture(page: Shown) -> None:
    """Boxes are as wide as their blocks and those below, and what has no box of its own is in a box for the rest."""
    trees = status(page, "tree.json")["trees"]
    whole = sum(tree["blocks"] for tree in trees)
    width = page.driver.find_element(By.ID, "tree").size["width"]
    wide = {str(box.get_attribute("data-id")): box.size["width"] for box in page.boxes()}
    for number, tree in enumerate(trees):
        for run in tree["shown"]:
            expected = width * (run["blocks"] + run["below"]) / whole
            if expected >= 4:
                assert wide[f"tree {number} {tree['namespace']} {run['name']}"] == pytest.approx(expected, abs=2)
    assert any(each.endswith("/rest") for each in wide)


def test_light_and_dark_are_readable(page: Shown) -> None:
    """Text has enough contrast with the page, and with a box at its strongest colour, in light and in dark."""
    papers = set()
    for scheme in ("light", "dark"):
        prefer(page.driver, scheme)
        names = ["ink", "quiet", "paper", "surface", "device", "host", "wrong", "wrong-paper", "good"]
        script = "const s = getComputedStyle(document.documentElement); return s.getPropertyValue('--' + arguments[0])"
        colours = {name: page.run(script, name).strip() for name in names}
        papers.add(page.run("return getComputedStyle(document.body).backgroundColor"))
        for text, ground in (
            *((text, ground) for text in ("ink", "quiet", "good") for ground in ("paper", "surface")),
            ("ink", "device"),
            ("ink", "host"),
            ("wrong", "wrong-paper"),
        ):
            assert contrast(colours[text], colours[ground]) >= CONTRAST_MIN, (scheme, text, ground)
    assert len(papers) == 2


def contrast(one: str, other: str) -> float:
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour: str) -> float:
    """Of ``#rrggbb``, as WCAG defines it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_phone_needs_no_sideways_scrolling(page: Shown) -> None:
    """At a phone's width nothing reaches beyond the page; wide tables scroll by themselves."""
    resize(page.driver, *PHONE, is_phone=True)
    page.open()

    assert page.run("return window.innerWidth") == PHONE[0]
    assert page.run("return document.documentElement.scrollWidth") <= PHONE[0]
    assert beyond(page) == []


def beyond(page: Shown) -> list[str]:
    """What reaches beyond the right edge of the page, is not cut by its box, and does not scroll by itself."""
    found: list[str] = page.run("""
        const isCut = (each) => each.closest(".scroll, svg, .box > span");
        return [...document.querySelectorAll("body *")].filter(
            (each) => !isCut(each) && each.getBoundingClientRect().right > window.innerWidth + 1
        ).map((each) => each.outerHTML.slice(0, 80))
    """)
    return found


def test_hidden_page_asks_nothing(page: Shown) -> None:
    """While the tab is hidden nothing is asked; when it is seen again, it asks at once."""
    hide = "Object.defineProperty(document, 'hidden', {configurable: true, get: () => arguments[0]});"
    hide = f"((...arguments) => {{{hide}}})(HIDDEN); document.dispatchEvent(new Event('visibilitychange'))"
    page.run(hide.replace("HIDDEN", "true"))
    page.driver.execute_async_script("setTimeout(arguments[0], 500)")  # what is under way
    requested(page.driver)
    page.driver.execute_async_script("setTimeout(arguments[0], 6000)")  # both intervals
    assert requested(page.driver) == []
    page.run(hide.replace("HIDDEN", "false"))
    asked: list[str] = []

    def both_are_asked_for() -> bool:
        asked.extend(requested(page.driver))
        return set(asked) == {f"{page.scene.url}{name}" for name in ("status.json", "tree.json")}

    page.until(both_are_asked_for)


def test_page_outlives_the_daemon(tmp_path: Path) -> None:
    """While the daemon is away the page says so and shows the last figures; then it goes on with the next daemon."""
    with chromium(tmp_path / "profile") as driver:
        with scene(tmp_path) as first:
            shown = Shown(first, driver)
            driver.get(first.url)
            shown.until(lambda: shown.text("link") == "live")
            epoch = status(shown)["daemon_epoch"]
            first.daemon.process.kill()
            shown.until(lambda: shown.text("link").startswith("no answer"))
            assert shown.text("state") == "serving"
            assert "old" in str(driver.find_element(By.TAG_NAME, "body").get_attribute("class"))
        port = int(first.url.rpartition(":")[2].strip("/"))
        with scene(tmp_path, port):
            shown.until(lambda: shown.text("link") == "live")
            assert f"epoch {epoch}" not in shown.text("facts")
            assert driver.find_element(By.TAG_NAME, "body").get_attribute("class") == ""
