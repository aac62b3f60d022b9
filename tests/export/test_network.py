"""`NetworkWeights`: each rank sends its slices once to each receiver, whole or as differences, in two phases."""

import os
import signal
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist

import shardproof as sp
from shardproof.export import packing, sender
from shardproof.export.channel import read_secret
from shardproof.export.network import NetworkWeights
from shardproof.export.receiver import Receiver
from shardproof.export.shared import SharedAddress, read_shared
from tests.export.test_shared_memory import CASES, LAYOUTS
from tests.export.test_stream import differences, load, make_interleaved, register_interleaved, train
from tests.ranks import run_ranks, run_ranks_outcomes

pytestmark = pytest.mark.distributed


@pytest.fixture
def start_receiver(secret):
    """A function that starts a receiver in this process and returns its name, host:port."""
    running = []

    def start(spoil=None):
        receiver = Receiver("127.0.0.1", 0, read_secret(secret, "test"))
        if spoil is not None:
            spoil(receiver)
        thread = threading.Thread(target=receiver.serve)
        thread.start()
        running.append((receiver, thread))
        return "{}:{}".format(*receiver.address)

    yield start
    for receiver, thread in running:
        receiver.close()
        thread.join()


def read(update):
    """What engines of the receiver's host see."""
    return {name: tensor.clone() for name, tensor in read_shared(SharedAddress.from_json(update["address"]))}


def send_three_times(folders, replicas, options, receiver, secret):
    """{case: [(tensors that differ from shared memory, same manifest, lost, share of bytes sent), ...]} per write."""
    found = {}
    for case, (folder, fields) in folders.items():
        if case == "whole":
            register_interleaved()
        policy = load(folder, replicas, **options, **fields)
        optimizer = sp.make_optimizer(policy, lr=1e-4)
        shared = sp.SharedWeights(policy, dtype=torch.bfloat16)
        network = NetworkWeights(policy, [receiver], secret, dtype=torch.bfloat16)
        rows = found[case] = []
        for step in range(3):
            expected, sent = shared.write(), network.write()
            mine = dict(read_shared(shared.address))
            odd = differences(read(sent.updates[receiver]), mine) if sent.updates else sorted(mine)
            same = sent.receipt.manifest == expected.manifest
            lost = [str(finding) for finding in sent.lost.values()]
            rows.append((odd, same, lost, sent.wire_bytes.get(receiver, 0) / expected.num_bytes))
            lost = network.commit([receiver])
            assert not lost, lost
            if step == 0:
                train(policy, optimizer)
        dist.barrier()
        network.close()
        shared.close()
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_received_is_what_shared_memory_has(checkpoint, start_receiver, secret, layout, tmp_path):
    num_ranks, replicas, options = LAYOUTS[layout]
    folders = {case: (checkpoint(family), fields) for case, (family, fields) in CASES.items()}
    make_interleaved(tmp_path / "whole", torch.float32)
    folders["whole"] = (tmp_path / "whole", {})
    replies = run_ranks(num_ranks, send_three_times, folders, replicas, options, start_receiver(), secret)
    for reply in replies:
        for case, rows in reply.items():
            assert [row[:3] for row in rows] == [([], True, [])] * 3, case
    for case, rows in replies[0].items():
        everything, some, nothing = (row[3] for row in rows)
        assert everything > 1 > some > nothing, (case, rows)


# What goes wrong at one receiver; the other one goes on.


def start_command(secret, port=0):
    """(process, name) of a receiver in a process of its own."""
    command = [sys.executable, "-m", "shardproof", "receive", "--secret-file", secret]
    process = subprocess.Popen([*command, "--listen", f"127.0.0.1:{port}"], stdout=subprocess.PIPE, text=True)
    return process, process.stdout.readline().split()[-1]


class Victim:
    """A receiver that rank 0 starts, kills and starts again at the same address."""

    def __init__(self, secret):
        self.secret, self.process, self.name = secret, None, None
        self.start()

    def start(self):
        names = [None]
        if dist.get_rank() == 0:
            port = self.name.rsplit(":", 1)[1] if self.name else 0
            self.process, names[0] = start_command(self.secret, port)
        dist.broadcast_object_list(names)
        self.name = names[0]

    def kill(self):
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process.stdout.close()


def kill_during(network, victim):
    """Write, and kill the victim after the first block of rank 0."""
    get = sender.Blocks.get
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "BLOCK_BYTES", 2**14)

        def get_and_kill(blocks, index):
            if index == 1:
                victim.kill()
            return get(blocks, index)

        patch.setattr(sender.Blocks, "get", get_and_kill)
        return network.write()


def lose_and_regain(folder, secret, other):
    """[(updated, lost, committed without a receipt, everything was sent to, right)] of syncs in which one receiver dies."""
    victim = Victim(secret)
    policy = load(folder)
    optimizer = sp.make_optimizer(policy, lr=1e-4)
    network = NetworkWeights(policy, [victim.name, other], secret, dtype=torch.bfloat16, deadline_s=30)
    shared = sp.SharedWeights(policy, dtype=torch.bfloat16)
    short = {victim.name: "victim", other: "other"}
    rows = []
    try:
        for how in ("", "during", "restarted", "between", "restarted", ""):
            if how == "restarted":
                victim.start()
            expected = shared.write()
            sent = kill_during(network, victim) if how == "during" else network.write()
            mine = dict(read_shared(shared.address))
            right = not any(differences(read(update), mine) for update in sent.updates.values())
            dist.barrier()
            if how == "between":
                victim.kill()
            dist.barrier()
            unsure = network.commit(list(sent.updates))
            rows.append(
                (
                    sorted(short[name] for name in sent.updates),
                    {short[name]: finding.code for name, finding in sent.lost.items()},
                    sorted(short[name] for name in unsure),
                    sorted(short[n] for n, size in sent.wire_bytes.items() if size >= expected.num_bytes),
                    right,
                )
            )
            if sent.lost or unsure:
                (finding,) = [*sent.lost.values(), *unsure.values()]
                assert victim.name in finding.message and finding.stage == "sync", finding
            train(policy, optimizer)
    finally:
        victim.kill()
        network.close()
        shared.close()
    return rows


def test_a_receiver_that_dies_is_named_and_gets_everything_when_it_is_back(
    checkpoint, start_receiver, secret
):
    both = ["other", "victim"]
    replies = run_ranks(2, lose_and_regain, checkpoint("llama"), secret, start_receiver())
    assert replies[0] == replies[1]
    assert replies[0] == [
        (both, {}, [], both, True),
        (["other"], {"victim": "R505"}, [], [], True),
        (both, {}, [], ["victim"], True),
        (both, {}, ["victim"], [], True),
        (both, {}, [], ["victim"], True),
        (both, {}, [], [], True),
    ]


def write_to_some(folder, receivers, secret, deadline_s):
    """(names of what was updated, findings by name, what commits without a receipt)."""
    network = NetworkWeights(load(folder), receivers, secret, dtype=torch.bfloat16, deadline_s=deadline_s)
    sent = network.write()
    unsure = network.commit(list(sent.updates))
    network.close()
    return list(sent.updates), {name: str(finding) for name, finding in sent.lost.items()}, unsure


def test_a_slow_receiver_ends_at_the_deadline_and_the_others_commit(checkpoint, start_receiver, secret):
    let_go = threading.Event()

    def spoil(receiver):
        receiver._inbox.put = lambda *args: let_go.wait(60)

    slow, good = start_receiver(spoil), start_receiver()
    try:
        replies = run_ranks(2, write_to_some, checkpoint("llama"), [slow, good], secret, 3.0)
    finally:
        let_go.set()
    for updated, lost, unsure in replies:
        assert (updated, list(lost), unsure) == ([good], [slow], {})
        assert f"the receiver of weights at {slow} is lost or too slow: no answer in time" in lost[slow]


def test_another_secret_and_nobody_there_are_said_in_a_line(checkpoint, start_receiver, secret, tmp_path):
    other = tmp_path / "other"
    other.write_text("another secret of some length")
    other.chmod(0o600)
    name = start_receiver()
    for updated, lost, _ in run_ranks(2, write_to_some, checkpoint("llama"), [name], str(other), 30.0):
        assert not updated
        assert lost[name].startswith(
            f"R502 sync: the receiver of weights at {name} refused: it has another secret."
        )
    for updated, lost, _ in run_ranks(2, write_to_some, checkpoint("llama"), ["127.0.0.1:9"], secret, 30.0):
        assert not updated
        assert "127.0.0.1:9 is lost or too slow: cannot connect: Connection refused" in lost["127.0.0.1:9"]


def write_with_a_secret_on_one_rank(folder, secret):
    mine = secret if dist.get_rank() == 0 else os.path.join(os.path.dirname(secret), "missing")
    NetworkWeights(load(folder), ["127.0.0.1:9"], mine)


def test_a_secret_file_that_one_rank_lacks_stops_all(checkpoint, secret):
    outcomes = run_ranks_outcomes(2, write_with_a_secret_on_one_rank, checkpoint("llama"), secret)
    for kind, name, message in outcomes:
        assert (kind, name) == ("error", "ConfigError")
        assert message.startswith("C001 sync: rank 1: the secret file")


def spoil_after_digests(folder, receiver, secret):
    """A value changes in rank 1's memory between the digests and the transfer."""
    network = NetworkWeights(load(folder), [receiver], secret, dtype=torch.bfloat16)
    if dist.get_rank() == 1:
        send = network._send

        def spoiled(*args):
            network._next.memory[network._packing.spans[0, 0]] ^= 1
            return send(*args)

        network._send = spoiled
    sent = network.write()
    network.close()
    return [(finding.code, finding.tensor, finding.message) for finding in sent.lost.values()]


def test_bytes_that_change_before_they_are_sent_are_named(checkpoint, start_receiver, secret):
    for reply in run_ranks(2, spoil_after_digests, checkpoint("llama"), start_receiver(), secret):
        ((code, tensor, message),) = reply
        assert (code, tensor) == ("R502", "model.embed_tokens.weight")
        assert "differs from what was sent" in message
