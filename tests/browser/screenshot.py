"""Pictures of the status page, of a daemon with conversations. Takes a minute.

    python -m tests.browser.screenshot FOLDER [light|dark|phone]…       writes status-page-light.png, …

docs/figures/status-page-light.png is made so.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from kvcached_client import Client
from tests.browser.browser import chromium, prefer, resize
from tests.browser.scene import Conversations, offload_engine, scene

WORK_S: Final = 45
TURNS_PER_S: Final = 8
#: Until a picture of the latest figures is drawn.
DRAWN_S: Final = 2
SIZES: Final = {"light": (1280, 1010), "dark": (1280, 1010), "phone": (390, 844)}


def main(folder: Path, names: list[str]) -> None:
    """Let an engine work, and take the pictures while it does."""
    with (
        tempfile.TemporaryDirectory() as directory,
        scene(Path(directory)) as (daemon, url),
        offload_engine(daemon, "tiny"),
        chromium(Path(directory) / "profile") as driver,
        Client.connect(daemon.run_dir, replica="chat", deadline_ms=10_000) as client,
    ):
        talks = Conversations(client)
        driver.get(url)
        end_s = time.monotonic() + WORK_S
        while time.monotonic() < end_s:
            talks.turn()
            time.sleep(1 / TURNS_PER_S)
        for name in names:
            prefer(driver, "dark" if name == "dark" else "light")
            resize(driver, *SIZES[name], is_phone=name == "phone")
            time.sleep(DRAWN_S)
            (folder / f"status-page-{name}.png").write_bytes(driver.get_screenshot_as_png())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or ["light"])
