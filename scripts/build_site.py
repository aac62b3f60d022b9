"""`make docs`: the documentation as a site, in site/. A broken link or anchor ends the build with exit code 1."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHANGELOG = "docs/changelog.md"  # there while the site is built: all of its pages lie in docs/


def build(root: Path = ROOT) -> tuple[int, str]:
    """Build the site of a checkout; returns the exit code and what the builder said."""
    shutil.rmtree(root / "site", ignore_errors=True)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    changelog = root / CHANGELOG
    changelog.write_text((root / "CHANGELOG.md").read_text().replace("](docs/", "]("))
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    finally:
        changelog.unlink()
    said, _, _ = (done.stdout + done.stderr).partition(
        "Traceback"
    )  # how it ends a strict build that found something
    return done.returncode, said.strip()


if __name__ == "__main__":
    code, said = build()
    print(said)
    if code == 0:
        print(f"open {ROOT / 'site' / 'index.html'}")
    raise SystemExit(code)
