"""A page as Chromium shows it: the DOM after its scripts ran."""

from __future__ import annotations

import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from xml.etree.ElementTree import Element, TreeBuilder

import pytest

from tests.report.browser import CHROMIUM_NAMES, FLAGS


class DomReader(HTMLParser):
    """An element tree from the HTML that Chromium dumps."""

    VOID = ("meta", "link", "img", "br", "hr", "input")

    def __init__(self) -> None:
        super().__init__()
        self.builder = TreeBuilder()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.builder.start(tag, {name: value or "" for name, value in attrs})
        if tag in self.VOID:
            self.builder.end(tag)

    def handle_endtag(self, tag: str) -> None:
        self.builder.end(tag)

    def handle_data(self, data: str) -> None:
        self.builder.data(data)


def open_page(page: Path, profile: Path, fragment: str = "") -> Element:
    """The DOM after the page's scripts ran. A message in the browser's console is a failure."""
    browser = next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)
    if browser is None:
        pytest.fail("Chromium is not installed. Fix: apt-get install -y --no-install-recommends chromium")
    flags = [flag for flag in FLAGS if flag != "--remote-debugging-pipe"]
    command = [
        browser,
        *flags,
        "--enable-logging=stderr",
        f"--user-data-dir={profile}",
        "--dump-dom",
        page.as_uri() + fragment,
    ]
    result = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=120)
    assert result.returncode == 0, result.stderr
    assert "CONSOLE" not in result.stderr, result.stderr
    reader = DomReader()
    reader.feed(result.stdout.strip().removeprefix("<!DOCTYPE html>"))
    return reader.builder.close()


def text_of(element: Element | None) -> str:
    assert element is not None
    return " ".join(" ".join(element.itertext()).split())


def tiles(dom: Element) -> dict[str, str]:
    return {
        text_of(tile.find("dt")): text_of(tile.find("dd")) for tile in dom.findall(".//*[@id='summary']/div")
    }


def rows(dom: Element, table: str) -> list[str]:
    return [text_of(row) for row in dom.findall(f".//table[@id='{table}']//tr")[1:]]
