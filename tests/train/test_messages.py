"""How many control messages a step, a score and a sync take, and how their bytes grow with the ranks."""

import random
import string

import pytest
import torch
import torch.distributed as dist

import shardproof as sp
from shardproof.dist.collectives import broadcast, exchange, together
from shardproof.dist.traffic import traffic
from shardproof.rollout.local import EmbeddedEngine
from tests.models import tiny_config
from tests.ranks import run_ranks

pytestmark = pytest.mark.distributed

# What takes three messages: one before the step, the verdict, and one after the optimizer's step.
AT_MOST = {"step": 3, "logprobs": 2, "sync": 8}


def messages_of(work):
    """(messages, collectives, bytes received) of `work`, on this rank."""
    before = _counts()
    work()
    return tuple(now - then for now, then in zip(_counts(), before, strict=True))


def _counts():
    total = traffic.total_control
    return traffic.messages, total.collectives, total.bytes_received


def warm_messages():
    config = tiny_config("qwen3", num_hidden_layers=1)
    policy = sp.load(sp.RandomInit(config), compute_dtype=torch.float32, progress=False)
    trainer, engine = sp.Trainer(policy, sp.make_optimizer(policy, lr=1e-3)), EmbeddedEngine(policy)
    sequences = [[1, 2, 3, 4 + dist.get_rank()]] * 2
    works = {
        "step": lambda: trainer.step(sp.Batch(sequences), micro_batch_tokens=4),
        "logprobs": lambda: sp.logprobs(policy, sequences, micro_batch_tokens=4),
        "sync": lambda: engine.load_weights(sp.WeightStream(policy)),
    }
    for work in works.values():
        work()
    return {name: messages_of(work) for name, work in works.items()}


def test_a_warm_step_takes_three_messages_and_bytes_grow_with_the_ranks():
    counts = {size: run_ranks(size, warm_messages)[0] for size in (2, 8)}
    for name, (messages, collectives, num_bytes) in counts[2].items():
        assert messages <= AT_MOST[name], name
        barriers = name == "sync"
        assert collectives == messages + barriers, name  # none is longer than a slot
        assert counts[8][name][0] == messages
        # Rank 0 gathers and answers, and asks once more where messages are long.
        assert counts[8][name][1] <= 4 * messages
        assert counts[8][name][2] <= 7 * num_bytes, name


def messages_alone():
    """The messages of a step without the step, and two that do not fit into a slot."""

    def before_a_step():
        with together("train_step") as message:
            message.mine = {"sequences": dist.get_rank(), "digest": "0" * 64}
        assert [row["sequences"] for row in message.rows] == list(range(dist.get_world_size()))

    def text(length, rank):
        """One that hardly gets shorter when it is compressed."""
        return "".join(random.Random(rank).choices(string.printable, k=length))

    def of_one_rank(length):
        value = [text(length, dist.get_rank()), dist.get_rank()]
        assert broadcast(value, source=1) == [text(length, 1), 1]

    def of_odd_ranks(length):
        rows = exchange(text(length * (dist.get_rank() % 2), dist.get_rank()))
        assert rows == [text(length * (rank % 2), rank) for rank in range(dist.get_world_size())]

    return [
        messages_of(work)
        for work in (
            before_a_step,
            lambda: of_one_rank(100),
            lambda: of_one_rank(5000),
            lambda: of_odd_ranks(100),
            lambda: of_odd_ranks(5000),
        )
    ]


def test_bytes_grow_at_most_linearly_up_to_many_ranks():
    """32 ranks of a model would take minutes on two cores, so here the messages travel without one."""
    counts = {size: run_ranks(size, messages_alone)[0] for size in (2, 8, 32)}
    assert [row[:2] for row in counts[2]] == [(1, 1), (1, 1), (1, 2), (1, 1), (1, 2)]
    assert [row[:2] for row in counts[8]] == [(1, 2), (1, 1), (1, 2), (1, 2), (1, 5)]
    assert [row[:2] for row in counts[32]] == [(1, 2), (1, 1), (1, 2), (1, 3), (1, 5)]
    for size in (8, 32):
        for now, then in zip(counts[size], counts[2], strict=True):
            assert now[2] <= 2 * size * then[2]
    # What one rank sends to all costs each of them the same, however many they are.
    assert counts[32][1:3] == counts[2][1:3]
