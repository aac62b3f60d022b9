"""A rank whose memory or device fails in the middle of a save: every rank hears of it, and none waits."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from shardproof.checkpoints import save as checkpoint_save
from shardproof.export.pretrained import save_pretrained
from tests.checkpoints.test_checkpoints import Run
from tests.models import make_checkpoint
from tests.ranks import run_ranks_outcomes
from tests.shard.test_bad_checkpoints import assert_all_raise

pytestmark = [pytest.mark.distributed, pytest.mark.fault]


def no_memory(*args, **kwargs):
    raise MemoryError("cannot allocate 12345 bytes")


def save_without_memory(source, folder, what, victim):
    """Save with a rank that cannot; module-level, for the ranks."""
    run = Run(source)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == victim:
            patch.setattr(checkpoint_save, "write_ranges", no_memory)
            patch.setattr(checkpoint_save, "check_index", no_memory)
            patch.setattr("shardproof.weights.writer.struct.pack", no_memory)
        if what == "model":
            save_pretrained(run.policy, folder, max_file_bytes=20_000)
        else:
            run.save(folder).wait()


@pytest.mark.parametrize(("what", "victim"), [("checkpoint", 0), ("checkpoint", 1), ("model", 1)])
def test_no_memory_on_one_rank_is_every_ranks_error(tmp_path, what, victim):
    source = make_checkpoint(tmp_path / "source", "llama")
    folder = tmp_path / "saved"
    outcomes = run_ranks_outcomes(2, save_without_memory, source, folder, what, victim, timeout=40)
    assert_all_raise(outcomes, "E408", f"rank {victim}", "cannot allocate 12345 bytes", kind="ExportFault")
    assert not folder.exists() or [path.name for path in folder.iterdir()] == [".lock"]
