"""Triton kernels in Triton's own interpreter, on the CPU, in a process of their own: the tests' environment has no Triton."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_PACKAGES = (
    ROOT / ".venv-triton/lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
)


def run_interpreted(module: str, *args: str) -> Any:
    """What a module prints, as JSON. bfloat16 in `tl.dot` is not to be had there; float32 and float16 are."""
    assert _PACKAGES.is_dir(), "Triton for the tests is missing: run `make .venv-triton/.stamp`"
    env = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT, _PACKAGES))),
    }
    command = [sys.executable, "-m", module, *args]
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)
