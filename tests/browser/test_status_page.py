"""The status page in a real browser, of a real daemon with blocks."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
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
        for _ in range(150):
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


def test_page_shows_the_figures_of_the_status(page: Shown) -> None:
    """State, hits, sessions, leases, pools, workers and storage are what /status.json says."""
    told = status(page)
    (pool,), counters = told["pools"], told["counters"]
    in_host = sum(host["states"]["cached"] for host in told["hosts"])
    hits = counters["hit_blocks"] + counters.get("host_hit_blocks", 0)

    assert page.text("state") == "serving"
    assert page.text("facts").startswith(f"{told['version']} · up ")
    assert page.text("sessions") == "2"
    assert page.text("leases-words") == "3 leases"
    assert page.text("cached").replace(",", "") == str(told["cached_blocks"] + in_host)
    assert page.text("hit-rate") == f"{hits / (hits + counters['missed_blocks']):.0%}"
    memory = {row[0]: row for row in page.rows("tiers")}
    assert memory["device of chat"][3:6] == [f"{SLOTS}", f"{pool['states']['free']}", f"{pool['states']['cached']}"]
    assert page.rows("workers") == [["chat", "tiny-chat", "cpu", "1", "healthy", "0"]]
    assert page.rows("sessions-table")[0][:3] == ["replica chat", str(pool["session"]), "3"]
    storage = {row[0]: row[1] for row in page.rows("storage")}
    assert (storage["backend"], storage["state"]) == ("disk", "ready")
    assert storage["blocks"].replace(",", "") == str(told["storage"]["blocks"])
    assert "acquire" in {row[0] for row in page.rows("requests")}
    assert any(row[0] == "device to host pool, by workers" for row in page.rows("copies"))
    assert page.driver.find_elements(By.CSS_SELECTOR, "#charts svg path.line, #charts svg path.area")


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
    beyond = page.run("""
        return [...document.querySelectorAll("body *")].filter(
            (each) => !each.closest(".scroll, svg") && each.getBoundingClientRect().right > window.innerWidth + 1
        ).map((each) => each.outerHTML.slice(0, 80))
    """)
    assert beyond == []


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
