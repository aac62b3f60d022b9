"""What pyproject.toml cannot say: the wheel holds the recipes and the page on faults, which are not below `src/`."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithShipped(build_py):
    """Copies into the package what `shardproof demo` and `shardproof explain` read, so that they need no clone."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:  # which reads the repository's own
            return
        files = sorted(path for path in Path("recipes").rglob("*") if path.is_file())
        shipped = {path: path for path in files if "__pycache__" not in path.parts}
        for path, name in (shipped | {Path("docs/faults.md"): Path("faults.md")}).items():
            target = Path(self.build_lib, "shardproof", name)
            self.mkpath(str(target.parent))
            self.copy_file(str(path), str(target))


setup(cmdclass={"build_py": BuildWithShipped})
