"""The site: every page is in it, every link leads somewhere, and no page asks another host for anything."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path

import pytest
import yaml

from tests.report.browser import Browser

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MADE = {"changelog.md"}  # by the build itself


def pages_of(nav) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [page for each in (nav.values() if isinstance(nav, dict) else nav) for page in pages_of(each)]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The built site of a copy of this checkout."""
    root = tmp_path_factory.mktemp("checkout")
    shutil.copytree(DOCS, root / "docs")
    for name in ("mkdocs.yml", "CHANGELOG.md"):
        shutil.copy(ROOT / name, root)
    spec = importlib.util.spec_from_file_location("build_site", ROOT / "scripts" / "build_site.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    code, said = script.build(root)
    assert code == 0, said
    return root / "site"


def test_every_page_is_in_the_navigation_once():
    pages = pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(pages) == sorted({path.name for path in DOCS.glob("*.md")} | MADE)


def test_the_build_finds_nothing_wrong(site):
    assert {path.stem for path in DOCS.glob("*.md")} <= {path.stem for path in site.glob("*.html")}


def test_pages_load_nothing_from_other_hosts(site):
    for page in site.glob("*.html"):
        tags = re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", page.read_text())
        assert [tag for tag in tags if re.search(r"""(?:src|href)=["']?(?:https?:)?//""", tag)] == [], (
            page.name
        )


def test_a_page_opens_and_searches_from_a_file(site, tmp_path):
    browser = Browser(tmp_path)
    try:
        with browser.tab() as tab:
            tab.open((site / "index.html").as_uri())
            tab.click(".md-search__button")
            search = "[...document.querySelectorAll('div')].find(node => node.shadowRoot)?.shadowRoot"
            tab.wait(f"!!{search}?.querySelector('input')")
            tab.js(f"{search}.querySelector('input').focus()")
            tab.call("Input.insertText", text="canary_tolerance")
            tab.wait(f"!!{search}?.textContent.includes('rollout.canary_tolerance')")
            assert tab.messages() == []
            assert [url for url in tab.requests() if not url.startswith("file:")] == []
    finally:
        browser.close()
