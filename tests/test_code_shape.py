"""Limits on the source that a reader relies on: sizes, imports, private state, and the words of the field."""

from __future__ import annotations

import ast
import statistics
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_MEDIAN_FUNCTION_LINES = 12

# The adapters to private interfaces of torch, transformers and vLLM; see docs/architecture.md.
ADAPTERS = {
    "model/flash_private.py",
    "model/hf_private.py",
    "rollout/vllm_ledger.py",
    "rollout/vllm_plugin.py",
    "rollout/vllm_transport.py",
    "shard/torch_private.py",
    "train/torch_muon.py",
}
# Private names of libraries that single files use beside the adapters.
SMALL_USES = {
    "dist/messages.py": {"_device_types"},
    "dist/groups.py": {"_device_types", "_get_backend", "_set_pg_timeout", "_timeout"},
    "dist/stacks.py": {"_get_default_store"},
    "model/buffers.py": {"_non_persistent_buffers_set"},
    "model/compiling.py": {"_dynamo"},
    "model/initial.py": {"_calculate_correct_fan", "_init_weights"},
    "model/inventory.py": {"_non_persistent_buffers_set"},
    "model/lora.py": {"_disable_adapters"},
    "model/replace.py": {"_buffers", "_parameters"},
    "rl/sizing/activations.py": {"_cdata"},
    "rl/sizing/live.py": {"_cdata"},
    "rollout/paged/model_step.py": {"_supports_attention_backend"},
    "shard/attest.py": {"_buffers"},
    "shard/offload.py": {"_cdata"},
    "train/guard.py": {"_foreach_mul_", "_foreach_norm"},
    "train/meter.py": {"_parameters"},
}
# Documented in spite of their underscore: of named tuples, os and sys.
DOCUMENTED = {"_asdict", "_current_frames", "_exit", "_fields", "_make", "_replace"}
# Words that only we would use; the field says "per token", "per rank", "resume", "stacks".
IDIOM = (
    "the roll",
    "one a token",
    "one a prediction",
    "one a sequence",
    "value a token",
    "tokens a rank",
    "tokens a micro-batch",
    "times a micro-batch",
    "thread a rank",
    "thread a process",
    "MB a layer",
    "bytes a rank",
)


@cache
def modules() -> dict[str, ast.Module]:
    """The package's modules by dotted name, parsed."""
    found = {}
    for path in sorted((SRC / "shardproof").rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text())
    return found


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return function.end_lineno - function.lineno + 1


def imported(name: str, tree: ast.Module) -> Iterator[tuple[str, int]]:
    """The package's modules that a module imports, at any depth of its code, each with the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names if alias.name in modules())
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: imports are absolute"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if whole in modules():
                    yield whole, node.lineno
                elif node.module in modules():
                    yield node.module, node.lineno


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The groups of nodes that reach each other (strongly connected components of more than one node)."""
    reached = {node: reach(graph, node) for node in graph}
    groups = {
        tuple(sorted(other for other in reached[node] if node in reached[other]))
        for node in graph
        if node in reached[node]
    }
    return [list(group) for group in sorted(groups)]


def reach(graph: dict[str, set[str]], start: str) -> set[str]:
    """What can be reached from a node over at least one edge."""
    seen: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting.extend(graph.get(node, ()))
    return seen


def path_of(module: str) -> str:
    """A module's file, relative to the package."""
    path = Path(*module.split(".")[1:])
    return str(path / "__init__.py" if (SRC / "shardproof" / path).is_dir() else path.with_suffix(".py"))


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__")) and name != "_"


@cache
def private_names(module: str) -> frozenset[str]:
    """The private names that a module defines: functions, classes, fields, attributes, variables."""
    names = set()
    for node in ast.walk(modules()[module]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            names.add(node.attr)
    return frozenset(filter(is_private, names))


def is_own(node: ast.expr) -> bool:
    """Whether an expression is self, cls or super()."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def private_uses(name: str) -> Iterator[tuple[int, str]]:
    """Line and text of every use of a private name that the module does not define, on objects other than its own."""
    allowed = private_names(name) | DOCUMENTED
    for node in ast.walk(modules()[name]):
        if isinstance(node, ast.ImportFrom):
            private = (alias.name for alias in node.names if is_private(alias.name))
            yield from ((node.lineno, f"{node.module}.{other}") for other in private)
        elif isinstance(node, ast.Attribute) and not is_own(node.value) and is_private(node.attr):
            if node.attr in allowed:
                continue
            yield node.lineno, ast.unparse(node)


def test_no_file_is_long():
    lines = {path: len(path.read_text().splitlines()) for path in (SRC / "shardproof").rglob("*.py")}
    assert {str(path.relative_to(SRC)): n for path, n in lines.items() if n > MAX_FILE_LINES} == {}


def test_no_function_is_long():
    long = {
        f"{name}.{function.name}": length(function)
        for name, tree in modules().items()
        for function in functions(tree)
        if length(function) > MAX_FUNCTION_LINES
    }
    assert long == {}


def test_most_functions_are_short():
    lengths = [length(function) for tree in modules().values() for function in functions(tree)]
    assert statistics.median(lengths) <= MAX_MEDIAN_FUNCTION_LINES


def test_no_modules_import_each_other():
    graph = {name: {other for other, _ in imported(name, tree)} for name, tree in modules().items()}
    # The package's own file lists the public names, and imports their modules on first use.
    graph.pop("shardproof")
    assert cycles(graph) == []


def test_the_search_finds_cycles():
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]
    assert cycles({"a": {"b"}, "b": set()}) == []


def test_no_module_imports_the_public_names():
    """They are resolved on first use, which hides what depends on what; a module names the file that it needs."""
    hidden = [
        f"{name}:{node.lineno}"
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "shardproof"
        if any(
            f"shardproof.{alias.name}" not in modules() and alias.name != "__version__"
            for alias in node.names
        )
    ]
    assert hidden == []


def test_private_state_stays_in_its_module():
    strange, used = [], {path: set() for path in SMALL_USES}
    for name in modules():
        path = path_of(name)
        for line, text in private_uses(name):
            last = text.rsplit(".", 1)[-1]
            if last in SMALL_USES.get(path, ()):
                used[path].add(last)
            elif path not in ADAPTERS or text.startswith("shardproof."):
                strange.append(f"{path}:{line}: {text}")
    assert strange == []
    assert used == SMALL_USES


def test_the_adapters_are_there():
    assert {path_of(name) for name in modules()} >= ADAPTERS


def test_words_are_those_of_the_field():
    files = [
        *(SRC / "shardproof").rglob("*.py"),
        *(ROOT / "docs").glob("*.md"),
        ROOT / "README.md",
        ROOT / "Makefile",
    ]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {phrase}"
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for phrase in IDIOM
        if phrase in line
    ]
    assert found == []
