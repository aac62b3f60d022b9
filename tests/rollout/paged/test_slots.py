"""Slots without requests are harmless, and parts share memory."""

from __future__ import annotations

import torch

from shardproof.rollout.paged.slots import Slots


def test_parts_share_memory_and_empty_slots_point_to_a_line_that_is_done():
    slots = Slots.make(5, 4, 7, 2, torch.device("cpu"))
    assert slots.done[slots.outputs].all() and not slots.done[:-1].any() and not slots.tables.any()
    part = slots.part(1, 3)
    part.positions.fill_(9)
    part.outputs[0] = 2
    assert part.rows == 2 and slots.positions[:, 0].tolist() == [0, 9, 9, 0, 0] and slots.outputs[1] == 2
