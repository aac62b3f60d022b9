"""Where users' modules are found."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shardproof.errors import ConfigError
from shardproof.user_code import find_modules_in, import_named


def test_modules_beside_a_recipe_are_found_here_and_in_later_processes_and_hide_no_others(
    tmp_path, monkeypatch
):
    (tmp_path / "only_beside_a_recipe.py").write_text("VALUE = 7\n")
    (tmp_path / "json.py").write_text("raise ImportError('this file must not hide the standard library')\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("SHARDPROOF_RECIPE_FOLDER", "")
    find_modules_in(tmp_path)
    assert import_named("reward", "only_beside_a_recipe:VALUE") == 7
    assert sys.path[-1] == str(tmp_path)
    code = (
        "from shardproof.user_code import import_named; import json\n"
        "print(import_named('reward', 'only_beside_a_recipe:VALUE'), import_named('reward', 'json:loads')('[]'))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert found.stdout == "7 []\n"


@pytest.mark.parametrize("file", ["closeness_of.py", "rewards/closeness_of.py", "rewards/closeness_of"])
def test_a_file_in_the_place_of_a_module_is_told_the_modules_name(file):
    with pytest.raises(ConfigError, match="name the module, not its file: closeness_of:close, with"):
        import_named("reward", f"{file}:close")
