"""One Chromium for all tests of a process."""

import pytest

from tests.report.browser import Browser


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def tab(browser):
    with browser.tab() as tab:
        yield tab


@pytest.fixture
def phone(browser):
    with browser.tab(390, 844) as tab:
        tab.call("Emulation.setTouchEmulationEnabled", enabled=True)
        yield tab
