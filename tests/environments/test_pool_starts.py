"""What must be true before the first conversation: the environment can be imported and made, here or in another Python."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from shardproof.environments import dispatcher, link
from shardproof.environments.pool import EnvironmentPool, EnvironmentSpec
from shardproof.environments.protocol import Failure, Opening, Turn
from shardproof.errors import ConfigError
from tests.environments.scripted import LONG_S, texts

WRONG = """
import os, sys, time
from shardproof import Environment
from shardproof.errors import fail
class Raises(Environment):
    def __init__(self): raise OSError("no server there")
class Leaves(Environment):
    def __init__(self): sys.exit(3)
class Dies(Environment):
    def __init__(self): os._exit(3)
class Hangs(Environment):
    def __init__(self): time.sleep(1000)
class Silent(Environment):
    roles = ()
class Word(Environment):
    roles = "user"
class Unlisted(Environment):
    tools = {"a": 1}
class Undescribed(Environment):
    tools = [{"a": {1}}]
class Takes(Environment):
    def __init__(self, difficulty, size=1): pass
class Named(Environment):
    def __init__(self): raise fail("C001", "environment", "'wrong_users:Named': its dataset is not there.")
class Other:
    pass
number = 3
"""

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
def users(user_module):
    return user_module("wrong_users", WRONG)


@pytest.mark.fault
@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("Raises", {}, r"cannot be made: OSError: no server there \(wrong_users.py:6\)"),
        ("Leaves", {}, "cannot be made: SystemExit: 3"),
        ("Dies", {}, r"did not start: its worker process died \(exit code 3\)"),
        ("Hangs", {}, "did not start: no answer in 1 s"),
        ("Silent", {}, r"has roles=\(\), expected"),
        ("Word", {}, "has roles='user', expected"),
        ("Unlisted", {}, "tools is a value of type dict, expected a list of schemas"),
        ("Undescribed", {}, "cannot be used: it is no JSON"),
        ("Takes", {"sizes": 2}, r"missing a required argument: 'difficulty'. It takes: difficulty, size"),
        ("Takes", {"difficulty": 1, "sizes": 2}, r"unexpected keyword argument 'sizes'. It takes: difficulty, size"),
        ("Other", {}, "makes a Other, which is no shardproof.Environment"),
        ("number", {}, "is a int, expected a class or a function"),
        ("Named", {}, "its dataset is not there"),
        ("Raise", {}, "has no 'Raise'. Did you mean 'Raises'?"),
    ],
)  # fmt: skip
def test_an_environment_that_cannot_be_made_is_refused_by_name(users, name, options, said, monkeypatch):
    if name == "Hangs":
        monkeypatch.setattr(link, "START_S", 1.0)
        monkeypatch.setattr(dispatcher, "START_S", 1.0)
    with pytest.raises(ConfigError, match=said) as caught:
        EnvironmentPool(EnvironmentSpec(f"wrong_users:{name}", options, timeout_s=0.1, num_workers=1))
    assert caught.value.code == "C001" and f"'wrong_users:{name}'" in str(caught.value)


def test_a_worker_needs_the_standard_library_alone():
    """And no newer Python than the oldest that environment.python may be."""
    program = (
        "import sys, shardproof.environments.worker; "
        "print(*(m.__file__ for n, m in sys.modules.items() if n.startswith('shardproof'))); "
        "assert not {'torch', 'numpy', 'pydantic', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for path in done.stdout.split():
        source = Path(path).read_text()
        ast.parse(source, feature_version=(3, 10))
        assert "asyncio.timeout" not in source and "TaskGroup" not in source


OWN = """
import importlib.util, sys
from shardproof import Environment

class Where(Environment):
    def step(self, turn):
        if turn.text == "die":
            __import__("os")._exit(2)
        return f"{sys.prefix} {importlib.util.find_spec('torch')} {importlib.util.find_spec('extra')} {turn.text}"
"""


@pytest.mark.slow
def test_workers_run_in_another_interpreter_that_has_nothing_installed(tmp_path, monkeypatch):
    """The user's folder and PYTHONPATH stay importable, the run's own packages do not; workers are replaced there too."""
    bare = tmp_path / "bare"
    venv.create(bare, with_pip=False)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "own_users.py").write_text(OWN)
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "extra.py").write_text("")
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    python = os.path.join("..", "bare", "bin", "python")
    spec = EnvironmentSpec("own_users:Where", timeout_s=LONG_S, num_workers=1, python=python)
    with EnvironmentPool(spec) as pool:
        for key in range(2):
            pool.open(key, {}, 0)
        assert dict(pool.answers()) == {0: Opening(), 1: Opening()}
        pool.step(0, Turn("die"))
        pool.step(1, Turn("hello"))
        found = dict(pool.answers())
    assert isinstance(found[0], Failure)
    (said,) = texts([found[1]])
    assert said.startswith(f"{bare} None ModuleSpec(name='extra'") and said.endswith("hello")


@pytest.mark.fault
@pytest.mark.parametrize(
    ("program", "said"),
    [
        (None, "cannot be started: .*No such file"),
        ("exit 3", "is not a Python interpreter that works: it says nothing"),
        ("echo broken >&2; exit 1", "is not a Python interpreter that works: broken"),
        ("echo 3 9", "is Python 3.9; workers need 3.10 or newer"),
    ],
)
def test_an_interpreter_that_cannot_be_used_is_refused_by_name(tmp_path, program, said):
    path = tmp_path / "python"
    if program:
        path.write_text(f"#!/bin/sh\n{program}\n")
        path.chmod(0o755)
    with pytest.raises(ConfigError, match=f"environment.python='{path}' {said}") as caught:
        EnvironmentPool(EnvironmentSpec("own_users:Where", python=str(path)))
    assert caught.value.code == "C001"
