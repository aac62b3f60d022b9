"""The list of files in docs/architecture.md, from the first line of each file's docstring.

python scripts/list_files.py          # print it
python scripts/list_files.py --write  # put it into the page
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "shardproof"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- files: scripts/list_files.py writes this list -->\n", "<!-- end of files -->\n"
# From the bottom of the package to its top.
ROOMS = (
    *(
        "",
        "config",
        "config/imported",
        "report",
        "environments",
        "dist",
        "model",
        "weights",
        "shard",
        "train",
        "export",
        "checkpoints",
    ),
    *(
        "rollout",
        "rollout/paged",
        "rl",
        "rl/chat",
        "rl/conversations",
        "rl/algorithms",
        "rl/rewards",
        "rl/sources",
        "rl/sizing",
        "doctor",
        "cli",
    ),
)


def list_files() -> str:
    """One table per room: each file, and what it says of itself."""
    tables = []
    for room in ROOMS:
        files = sorted(path for path in (PACKAGE / room).glob("*.py") if path.name != "__init__.py")
        rows = [f"| `{path.name}` | {first_line(path)} |" for path in files]
        head = f"### {room or 'shardproof'}/\n\n{first_line(PACKAGE / room / '__init__.py')}\n"
        tables.append("\n".join([head, "| file | what it is |", "| --- | --- |", *rows]))
    return "\n\n".join(tables) + "\n\n"


def first_line(path: Path) -> str:
    """The first line of a module's docstring, fit for a table's cell."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return docstring.partition("\n")[0].replace("|", r"\|")


def page_with(files: str) -> str:
    """The page with this list of files in place of its own."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{files}{END}{after}"


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page_with(list_files()))
    else:
        print(list_files())
