"""The site of the documents, opened from its files: it is searched, and fits a phone, in light and dark.

    python -m tests.browser.site build/site [PICTURES]        pictures of some pages go to the folder PICTURES

Needs the folder that `make docs` makes, and Chromium. `.ci/run` calls it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Final

from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.wait import WebDriverWait

from tests.browser.browser import chromium, prefer, requested, resize

PAGES: Final = ("index", "docs/quick-start", "docs/concepts", "docs/operations", "docs/configuration")
DESKTOP: Final = (1280, 900)
PHONE: Final = (390, 844)
TIMEOUT_S: Final = 20


def main(site: Path, pictures: Path | None) -> None:
    """Check everything; the first thing that is wrong ends it with an exception."""
    with tempfile.TemporaryDirectory() as profile, chromium(Path(profile)) as driver:
        search(driver, site, "quarantined", "docs/concepts.html")
        for scheme in ("light", "dark"):
            prefer(driver, scheme)
            for page in PAGES:
                for device, size in (("desktop", DESKTOP), ("phone", PHONE)):
                    resize(driver, *size, is_phone=device == "phone")
                    driver.get((site / f"{page}.html").as_uri())
                    fits(driver, size[0])
                    if pictures:
                        name = f"{page.replace('/', '-')}-{scheme}-{device}.png"
                        (pictures / name).write_bytes(driver.get_screenshot_as_png())
        elsewhere = [address for address in requested(driver) if not address.startswith("file:")]
        assert elsewhere == [], elsewhere
    print(f"{site}: searched, and {len(PAGES)} pages looked at, without a network")  # noqa: T201 - a command's output


def search(driver: WebDriver, site: Path, word: str, page: str) -> None:
    """The search finds a page by a word, from a file."""
    driver.get(f"{(site / 'search.html').as_uri()}?q={word}")
    WebDriverWait(driver, TIMEOUT_S).until(lambda _: page in found(driver))


def found(driver: WebDriver) -> list[str]:
    """The pages that the search lists."""
    links = driver.find_elements(By.CSS_SELECTOR, "#search-results li a")
    return [
        (link.get_attribute("href") or "").partition("?")[0].partition("#")[0].split("/site/")[-1] for link in links
    ]


def fits(driver: WebDriver, width: int) -> None:
    """No page is wider than the screen: what is wide scrolls by itself."""
    page = driver.execute_script("return document.documentElement.scrollWidth")
    assert page <= width, (driver.current_url, page)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), Path(sys.argv[2]) if sys.argv[2:] else None)
