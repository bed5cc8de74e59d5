"""Headless Chromium, as Debian's packages `chromium` and `chromium-driver` bring it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
#: Without a display, as root, and silent: it asks nobody but who it is told to.
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


@contextmanager
def chromium(profile: Path) -> Iterator[webdriver.Chrome]:
    """A browser with a new profile. It logs what pages write to the console, and each of their requests."""
    options = Options()
    options.binary_location = CHROMIUM or ""
    for flag in (*FLAGS, f"--user-data-dir={profile}", "--window-size=1280,900"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        driver.set_page_load_timeout(20)
        driver.set_script_timeout(20)
        yield driver
    finally:
        driver.quit()


def resize(driver: webdriver.Chrome, width: int, height: int, *, is_phone: bool = False) -> None:
    """The size of the page, in its own pixels; a phone has a touch screen."""
    size = {"width": width, "height": height, "deviceScaleFactor": 2 if is_phone else 1, "mobile": is_phone}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    driver.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})


def prefer(driver: webdriver.Chrome, scheme: str) -> None:
    """Let the system prefer dark or light, and nothing that moves."""
    wanted = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
    features = [{"name": name, "value": value} for name, value in wanted.items()]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def requested(driver: webdriver.Chrome) -> list[str]:
    """The addresses in a network that were asked for since the last call."""
    entries: list[dict[str, Any]] = driver.get_log("performance")  # type: ignore[no-untyped-call]
    events = [json.loads(entry["message"])["message"] for entry in entries]
    urls = [each["params"]["request"]["url"] for each in events if each["method"] == "Network.requestWillBeSent"]
    return [url for url in urls if not url.startswith(("chrome:", "data:"))]


def console(driver: webdriver.Chrome) -> list[str]:
    """What was written to the console since the last call."""
    entries: list[dict[str, Any]] = driver.get_log("browser")  # type: ignore[no-untyped-call]
    return [str(entry["message"]) for entry in entries]
