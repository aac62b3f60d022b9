"""The protocol is importable anywhere: worker processes of other interpreters have nothing but the standard library."""

from __future__ import annotations

import subprocess
import sys


def test_the_protocol_needs_the_standard_library_alone():
    code = "import sys; import shardproof.environments.protocol; print(sorted(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    for package in ("torch", "transformers", "pydantic", "numpy"):
        assert repr(package) not in loaded
