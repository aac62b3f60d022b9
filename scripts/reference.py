"""The reference pages of the documentation, written from the source: settings, command line, Python API.

python scripts/reference.py           # say which pages are out of date
python scripts/reference.py --write   # bring them up to date
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts import reference_api, reference_commands, reference_settings  # noqa: E402

PAGES = {
    "settings.md": reference_settings.page,
    "command-line.md": reference_commands.page,
    "python-api.md": reference_api.page,
}


def outdated() -> dict[Path, str]:
    """The pages that do not say what the source says, with what they should say."""
    pages = {ROOT / "docs" / name: page() for name, page in PAGES.items()}
    return {path: text for path, text in pages.items() if not path.exists() or path.read_text() != text}


if __name__ == "__main__":
    for path, text in outdated().items():
        print(path.relative_to(ROOT))
        if "--write" in sys.argv:
            path.write_text(text)
