"""What each part of the package may import, where import-linter cannot see it."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardproof

PACKAGE = Path(shardproof.__file__).parent


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Every dotted name that running the module may import, with the uses of `torch.distributed` as an attribute."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for statement in node.orelse:
                yield from imported_names(statement)
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield "torch.distributed"
        yield from imported_names(node)


def offenders(room: str, *prefixes: str) -> list[str]:
    found = []
    for path in sorted((PACKAGE / room).rglob("*.py")):
        for name in imported_names(ast.parse(path.read_text())):
            if any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes):
                found.append(f"{path.relative_to(PACKAGE)}: {name}")
    return found


def run_python(program: str) -> None:
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    "statement",
    [
        "import torch.distributed as dist",
        "import torch.distributed.tensor",
        "from torch import distributed",
        "from torch.distributed.tensor import DTensor",
        "def late():\n    from torch.distributed import ReduceOp",
        "rank = torch.distributed.get_rank()",
    ],
)
def test_the_check_sees_every_form_of_import(statement):
    assert any(name.startswith("torch.distributed") for name in imported_names(ast.parse(statement)))


def test_model_does_not_import_torch_distributed():
    assert (PACKAGE / "model").is_dir()
    assert offenders("model", "torch.distributed") == []


def test_config_imports_no_torch_and_no_other_room():
    bottom = {
        "errors",
        "findings",
        "bounds",
        "text",
        "files",
        "foreign",
        "user_code",
    }  # the layer below every room
    others = {path.stem for path in PACKAGE.iterdir()} - bottom - {"config", "__init__"}
    rooms = [f"shardproof.{name}" for name in sorted(others)]
    assert offenders("config", "torch", "transformers", *rooms) == []


def test_importing_the_package_does_not_import_torch():
    run_python(
        "import sys, shardproof\nassert 'torch' not in sys.modules\nassert 'transformers' not in sys.modules"
    )


def test_loading_and_engines_do_without_pydantic():
    run_python(
        "import sys\nsys.modules['pydantic'] = None\nimport shardproof, shardproof.rollout.vllm_engine\n"
        "assert callable(shardproof.load)"
    )
