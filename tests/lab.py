"""Drives a notebook in JupyterLab and a real Chromium: for the browser test and for looking.

python tests/lab.py NOTEBOOK --screenshots DIR    runs all cells, moves the sliders, saves pictures
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
STDERR = '[data-mime-type="application/vnd.jupyter.stderr"]'
PROMPTS = ".jp-CodeCell .jp-InputPrompt"
PICTURE = "img.widget-image"
HANDLE = f".jp-OutputArea-output:has({PICTURE}) .widget-slider .noUi-handle"  # not a guess's slider
OUTPUT = "xpath=ancestor::*[contains(@class, 'jp-OutputArea-output')][1]"
NO_NEWS = '{"fetchNews": "false", "checkForUpdates": false}'  # their pop-up would hide a figure


@contextlib.contextmanager
def jupyterlab(notebook: Path) -> Iterator[str]:
    """A JupyterLab of its own on a temporary copy of `notebook`; yields the notebook's address.

    Files beside the notebook come along; the user's own configuration is neither read nor written.
    Raises RuntimeError with the server's last lines when it does not start.
    """
    with tempfile.TemporaryDirectory() as temporary:
        root, home = Path(temporary, "root"), Path(temporary, "home")
        shutil.copytree(notebook.parent, root, ignore=shutil.ignore_patterns(".*", "images"))
        settings = home / "jupyter_config_dir/lab/user-settings/@jupyterlab/apputils-extension"
        settings.mkdir(parents=True)
        (settings / "notification.jupyterlab-settings").write_text(NO_NEWS)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        token, log = secrets.token_hex(16), Path(temporary, "log.txt")
        folders = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
        environment = {**os.environ, **{name: str(home / name.lower()) for name in folders}}
        command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1"]
        command += [f"--port={port}", "--ServerApp.port_retries=0", f"--ServerApp.root_dir={root}"]
        command += [f"--IdentityProvider.token={token}"]
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            command += ["--allow-root"]
        with log.open("w") as out:
            server = subprocess.Popen(command, env=environment, stdout=out, stderr=out, cwd=root)
        try:
            base = f"http://127.0.0.1:{port}"
            _wait_for(f"{base}/api?token={token}", server, log)
            yield f"{base}/lab/tree/{notebook.name}?token={token}&reset"
        finally:
            server.terminate()
            try:
                server.wait(timeout=15)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _wait_for(
    address: str, server: subprocess.Popen[bytes], log: Path, seconds: float = 60
) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and server.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=2):
            return
        time.sleep(0.2)
    raise RuntimeError(
        "JupyterLab did not start:\n" + "\n".join(log.read_text().splitlines()[-20:])
    )


class Lab:
    """One notebook, open in a page."""

    def __init__(self, page: Any) -> None:
        self.page = page

    def run_all(self, seconds: float = 180) -> None:
        """Runs every cell until all have a number. Raises TimeoutError naming the prompts."""
        self.page.get_by_role("menuitem", name="Run", exact=True).click()
        self.page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            prompts = self.prompts()
            if prompts and all(p.strip("[]:").isdigit() for p in prompts):
                return
            time.sleep(0.3)
        raise TimeoutError(f"cells still run after {seconds:g} s: {self.prompts()}")

    def prompts(self) -> list[str]:
        """The text before each code cell that is not folded: "[3]:", "[*]:" while running."""
        return [text.strip() for text in self.page.locator(PROMPTS).all_text_contents() if text]

    def stderr(self) -> list[str]:
        """What cells wrote to stderr, tracebacks included."""
        return self.page.locator(STDERR).all_text_contents()

    def press(self, slider: int, key: str, seconds: float = 20) -> tuple[str, str]:
        """Presses `key` on a slider; returns its widget's picture address before and after.

        Raises TimeoutError when the picture stays the same.
        """
        handle = self.page.locator(HANDLE).nth(slider)
        picture = handle.locator(OUTPUT).locator(PICTURE)
        before = picture.get_attribute("src")
        handle.scroll_into_view_if_needed()
        handle.focus()
        self.page.keyboard.press(key)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if (after := picture.get_attribute("src")) != before:
                return before, after
            time.sleep(0.05)
        raise TimeoutError(f"{key} on slider {slider} left its picture unchanged for {seconds:g} s")

    def inward(self, slider: int) -> str:
        """The arrow key that moves a slider: left where it stands at its right end."""
        handle = self.page.locator(HANDLE).nth(slider)
        at, end = (float(handle.get_attribute(f"aria-value{x}")) for x in ("now", "max"))
        return "ArrowLeft" if at == end else "ArrowRight"

    def sliders(self) -> int:
        """How many sliders with a picture the notebook shows."""
        return self.page.locator(HANDLE).count()

    def screenshot(self, path: Path) -> None:
        """The window as it is."""
        self.page.screenshot(path=path)

    def cells(self, folder: Path, name: str) -> None:
        """One picture a cell, scrolled into view: FOLDER/NAME-00.png and on."""
        cells = self.page.locator(".jp-Notebook .jp-Cell")
        for i in range(cells.count()):
            cells.nth(i).scroll_into_view_if_needed()
            cells.nth(i).screenshot(path=folder / f"{name}-{i:02}.png")


@contextlib.contextmanager
def open_notebook(notebook: Path, chromium: str) -> Iterator[Lab]:
    """`notebook` in a fresh JupyterLab and an installed Chromium, by path; its kernel is ready."""
    from playwright.sync_api import sync_playwright

    with jupyterlab(notebook) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, headless=True, args=FLAGS)
        try:
            page = browser.new_page(viewport={"width": 1400, "height": 1000})
            page.set_default_timeout(60_000)
            page.goto(address)
            status = page.locator("#jp-main-statusbar")
            status.get_by_text("| Idle").wait_for()  # the notebook's own sign says so too early
            yield Lab(page)
        finally:
            browser.close()


def main() -> None:
    """Command line: see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--screenshots", type=Path, default=Path("screenshots"), metavar="DIR")
    parser.add_argument("--chromium", default=shutil.which("chromium"), metavar="PATH")
    arguments = parser.parse_args()
    folder: Path = arguments.screenshots
    folder.mkdir(parents=True, exist_ok=True)
    with open_notebook(arguments.notebook.resolve(), arguments.chromium) as lab:
        start = time.monotonic()
        lab.run_all()
        print(f"ran {len(lab.prompts())} cells in {time.monotonic() - start:.1f} s")
        for text in lab.stderr():
            print("stderr:", text)
        lab.cells(folder, "cell")
        for slider in range(lab.sliders()):
            lab.press(slider, lab.inward(slider))
            lab.screenshot(folder / f"slider-{slider}.png")
        print(f"pictures are in {folder}")


if __name__ == "__main__":
    main()
