"""Ranks compare code: what an editor leaves in a folder and modules inside of archives do not stop them."""

import importlib
import zipfile

import pytest

from shardproof.rl import compared_files

pytestmark = pytest.mark.fault


def test_a_lock_of_an_editor_is_no_source(tmp_path):
    (tmp_path / "one.py").write_text("A = 1\n")
    before = compared_files.sources_digest(tmp_path)
    (tmp_path / ".#one.py").symlink_to("user@host.1234:5678")
    (tmp_path / "folder.py").mkdir()
    assert compared_files.sources_digest(tmp_path) == before


def test_a_reward_in_an_archive_is_compared_by_its_content(tmp_path, monkeypatch):
    path = tmp_path / "rewards.zip"

    def digest(text):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("zipped_rewards.py", text)
        importlib.invalidate_caches()
        return compared_files.module_file("zipped_rewards:score").digest()

    monkeypatch.syspath_prepend(path)
    first = digest("def score(*sample): return 1.0\n")
    assert first == digest("def score(*sample): return 1.0\n") != digest("def score(*sample): return 0.0\n")
