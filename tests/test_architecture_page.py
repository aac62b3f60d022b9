"""docs/architecture.md lists every file of the package, with what the file says of itself."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_page_lists_every_file_as_it_is():
    spec = importlib.util.spec_from_file_location("list_files", ROOT / "scripts" / "list_files.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    files = script.list_files()
    package = ROOT / "src" / "shardproof"
    for path in package.rglob("*.py"):
        assert path.name == "__init__.py" or f"| `{path.name}` |" in files, (
            f"{path} is in no room of the list"
        )
        assert script.first_line(path), f"{path} does not say what it is"
    assert script.page_with(files) == script.PAGE.read_text(), "run python scripts/list_files.py --write"
