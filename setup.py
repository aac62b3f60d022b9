"""What pyproject.toml cannot say: the wheel holds `recipes/`, which lies beside `src/` in the repository."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithRecipes(build_py):
    """Copies the recipes into the package, so that `shardproof demo` needs no clone."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:  # which reads the repository's own
            return
        for path in sorted(Path("recipes").rglob("*")):
            if path.is_file():
                target = Path(self.build_lib, "shardproof", path)
                self.mkpath(str(target.parent))
                self.copy_file(str(path), str(target))


setup(cmdclass={"build_py": BuildWithRecipes})
