"""A receiver of weights over real sockets: who may talk to it, what it takes, and what it never commits."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from shardproof.digest import digest
from shardproof.dist.deadline import Deadline
from shardproof.errors import ShardproofError
from shardproof.export import channel, receiver
from shardproof.export.address import SharedAddress, read_shared
from shardproof.export.channel import Lost, Refused, connect, parse_address, read_secret
from shardproof.export.differences import encode
from shardproof.export.image import Image, ImageLayout
from shardproof.export.packing import Packing
from shardproof.export.received import announce
from shardproof.export.receiver import Receiver
from shardproof.export.sender import Blocks, Session, read_answer, send_slices
from shardproof.weights.writer import TensorMeta
from tests.sockets import all_loopback, listening

pytestmark = pytest.mark.usefixtures("nothing_left")

SECRET = "correct horse battery staple"
METAS = [
    TensorMeta("a", torch.bfloat16, (37, 11)),
    TensorMeta("empty", torch.float32, (0, 4)),
    TensorMeta("b", torch.float32, (300,)),
    TensorMeta("flag", torch.uint8, (5,)),
]
LAYOUT = ImageLayout(METAS)
WAIT_S = 20.0


@pytest.fixture(scope="module")
def secret(tmp_path_factory):
    path = tmp_path_factory.mktemp("secret") / "secret"
    path.write_text(SECRET + "\n")
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def key(secret):
    return read_secret(secret, "test")


@pytest.fixture
def running(key):
    """A receiver that answers in this process."""
    found = Receiver("127.0.0.1", 0, key)
    thread = threading.Thread(target=found.serve)
    thread.start()
    yield found
    found.close()
    thread.join()


def image_of(seed, like=None, share=1.0):
    """A payload; with `like`, that one with a share of its bytes replaced."""
    rng = np.random.default_rng(seed)
    image = Image.private(LAYOUT)
    memory = image.memory.numpy()
    memory[:] = rng.integers(0, 256, LAYOUT.size)
    if like is not None:
        memory[:] = np.where(rng.random(LAYOUT.size) < share, memory, like.memory.numpy())
    return image


def digests_of(image):
    return [digest(image.flat(meta.name)) for meta in METAS]


def split(num_ranks, skip=None, double=None):
    """Each rank's packing: ranks take turns by elements; an element may be left out or be another rank's too."""
    packings = []
    for rank in range(num_ranks):
        ranges = {}
        for meta in METAS:
            count = LAYOUT.places[meta.name].numel
            edges = [count * k // num_ranks for k in range(num_ranks + 1)]
            low, high = edges[rank], edges[rank + 1]
            if skip == (rank, meta.name):
                high -= 1
            if double == (rank, meta.name):
                low -= 1
            if low < high:
                ranges[meta.name] = np.array([[low, high]])
        packings.append(Packing.of(ranges, LAYOUT))
    return packings


class Trainer:
    """Brings payloads to a receiver as ranks do; a test changes what it likes."""

    def __init__(self, running, key, run="run"):
        self.address, self.key, self.run = running.address, key, run
        self.base = None  # (version, image)
        self.session = None

    def begin(self, number, **changes):
        limit = Deadline(WAIT_S)
        self.session = Session(self.address, self.key, WAIT_S, limit)
        announced = {"run": self.run, "version": number, "tensors": announce(METAS), "size": LAYOUT.size}
        return self.session.begin(announced | changes, limit)

    def send(self, image, packings, **changes):
        version, old = self.base or (None, None)
        for rank, packing in enumerate(packings):
            blocks = Blocks(packing, image.memory.numpy(), old.memory.numpy() if old is not None else None)
            request = {"ticket": self.session.ticket, "rank": rank, "base": version} | changes
            send_slices(self.address, self.key, request, blocks, Deadline(WAIT_S))

    def verify(self, image):
        return self.session.verify(digests_of(image), Deadline(WAIT_S))

    def commit(self, version, image=None):
        receipt = self.session.commit(version, Deadline(WAIT_S))
        self.base = (version, image)
        self.session.close()
        return receipt

    def bring(self, version, image, packings=None):
        self.begin(version)
        self.send(image, packings or split(2))
        receipt = self.verify(image)
        self.commit(version, image)
        return receipt

    def close(self):
        if self.session is not None:
            self.session.close()


@pytest.fixture
def trainer(running, key):
    made = Trainer(running, key)
    yield made
    made.close()


def holds(receipt, image):
    """Whether engines read this payload at the address in a receipt."""
    tensors = dict(read_shared(SharedAddress.from_json(receipt["address"])))
    return list(tensors) == [meta.name for meta in METAS] and all(
        torch.equal(tensor.reshape(-1).view(torch.uint8), image.flat(name).view(torch.uint8))
        for name, tensor in tensors.items()
    )


# What arrives.


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_versions_arrive_whole_and_then_as_differences(trainer, num_ranks):
    images = [image_of(0)]
    images += [image_of(seed, images[0], share) for seed, share in ((1, 0.01), (2, 0.5), (3, 0))]
    sizes = []
    for version, image in enumerate(images):
        receipt = trainer.bring(version, image, split(num_ranks))
        assert receipt["version"] == version
        assert holds(receipt, image)
        sizes.append(receipt["wire_bytes"])
    nbytes = sum(place.nbytes for place in LAYOUT.places.values())
    assert sizes[0] == nbytes and sizes[1] < nbytes / 5


def test_the_committed_payload_stays_until_the_next_commit(trainer):
    first, second, third = image_of(1), image_of(2), image_of(3)
    committed = trainer.bring(1, first)
    trainer.begin(2)
    trainer.send(second, split(2))
    pending = trainer.verify(second)
    assert holds(committed, first) and holds(pending, second)
    trainer.session.close()  # not committed: given up
    answer = begin_when_free(trainer, 3)
    assert answer["base"]["version"] == 1
    trainer.send(third, split(3))
    assert holds(trainer.verify(third), third) and holds(committed, first)
    assert trainer.commit(3)["version"] == 3


def begin_when_free(trainer, version):
    """Begin once the receiver has noticed that an earlier session ended."""
    end = time.monotonic() + WAIT_S
    while True:
        try:
            return trainer.begin(version)
        except Refused:
            trainer.session.close()
            if time.monotonic() > end:
                raise
            time.sleep(0.01)


# What does not arrive as it should: named, and the base is as it was.


def send_block_twice(image):
    packing = split(1)[0]
    half = packing.size // 2
    parts = [
        packing.take(image.memory.numpy(), 0, half),
        packing.take(image.memory.numpy(), half, packing.size),
    ]
    return packing, [(0, parts[0]), (0, parts[0]), (half, parts[1])]


def send_blocks(trainer, packing, blocks):
    """Send blocks (where, bytes) as rank 0."""
    link = connect(trainer.address, trainer.key, Deadline(WAIT_S))
    try:
        request = {
            "ask": "slices",
            "seconds": WAIT_S,
            "ticket": trainer.session.ticket,
            "rank": 0,
            "base": None,
        }
        link.send(request, (packing.spans.reshape(-1),), Deadline(WAIT_S))
        for at, values in blocks:
            block = encode(values, None)
            link.send({"ask": "block", "at": at, **block.to_json()}, block.parts, Deadline(WAIT_S))
        link.send({"ask": "end"}, (), Deadline(WAIT_S))
        read_answer(link, Deadline(WAIT_S))
    finally:
        link.close()


def fault(trainer, how, image):
    """Bring version 2 with something wrong in it."""
    trainer.base = None
    trainer.begin(2)
    if how == "missing element":
        trainer.send(image, split(2, skip=(0, "a")))
    elif how == "doubled element":
        trainer.send(image, split(2, double=(1, "b")))
    elif how == "missing rank":
        trainer.send(image, split(3)[:2])
    elif how == "changed value":
        wrong = image_of(0, image, 0)
        wrong.flat("b")[7] += 1
        trainer.send(wrong, split(2))
    elif how == "other base":
        trainer.base = (0, image)
        trainer.send(image, split(2))
    elif how == "rank twice":
        trainer.send(image, split(2))
        trainer.send(image, split(2)[:1])
    elif how == "block twice":
        send_blocks(trainer, *send_block_twice(image))
    elif how == "block missing":
        packing, blocks = send_block_twice(image)
        send_blocks(trainer, packing, blocks[2:])
    elif how == "block short":
        packing, blocks = send_block_twice(image)
        send_blocks(trainer, packing, blocks[:1])
    elif how == "not verified":
        trainer.send(image, split(2))
        trainer.commit(2)
    elif how == "other version":
        trainer.send(image, split(2))
        trainer.verify(image)
        trainer.commit(3)
    elif how == "other ticket":
        trainer.send(image, split(2), ticket="0" * 32)
    trainer.verify(image)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("missing element", "'a': bytes .* were sent by no rank"),
        ("doubled element", "'b': bytes from .* were sent twice, by ranks 0 and 1"),
        ("missing rank", "'a': bytes .* were sent by no rank"),
        ("changed value", "'b' differs from what was sent"),
        ("other base", "rank 0 sends differences from version 0, but version 1 is committed"),
        ("rank twice", "rank 0: it has sent its slices already"),
        ("block twice", "rank 0 sent bytes 0 of its slices twice"),
        ("block missing", "rank 0 sent bytes .* of its slices without those before them"),
        ("block short", "of .* bytes of rank 0's slices arrived"),
        ("not verified", "version 2 cannot be committed: what is here is not verified"),
        ("other version", "version 3 cannot be committed: what is here is version 2"),
        ("other ticket", "was given up or replaced"),
    ],
)
def test_a_payload_that_is_not_whole_is_named_and_the_base_stays(trainer, how, words):
    first, second = image_of(1), image_of(2)
    committed = trainer.bring(1, first)
    with pytest.raises(Refused, match=words):
        fault(trainer, how, second)
    trainer.session.close()
    assert holds(committed, first)
    assert begin_when_free(trainer, 2)["base"]["version"] == 1
    trainer.base = (1, first)
    trainer.send(second, split(2))
    assert holds(trainer.verify(second), second)


@pytest.mark.parametrize(
    "changes",
    [
        {"size": 1},
        {"tensors": [["a", "float99", [1]]]},
        {"tensors": [["a", "float32", [-1]]]},
        {"tensors": [["a", "float32", [1]]] * 2, "size": 128},
        {"tensors": [["a", "float32", [2**47]]], "size": 2**49},
        {"version": "x"},
        {"version": None},
    ],
)
def test_an_announcement_that_cannot_be_is_refused(trainer, changes):
    with pytest.raises(Refused):
        trainer.begin(1, **changes)


# Several runs.


def test_another_run_is_refused_during_a_transfer_and_then_takes_over(running, key, trainer):
    mine, theirs = image_of(1), image_of(2)
    other = Trainer(running, key, "other")
    trainer.bring(1, mine)
    trainer.begin(2)
    with pytest.raises(Refused, match="run run is bringing version 2"):
        other.begin(7)
    other.session.close()
    trainer.send(mine, split(2))
    trainer.verify(mine)
    trainer.commit(2, mine)
    assert other.begin(7)["base"] is None  # everything
    other.send(theirs, split(2))
    assert holds(other.verify(theirs), theirs)
    other.commit(7, theirs)
    assert trainer.begin(3)["base"] is None
    trainer.session.close()
    trainer.base = None
    begin_when_free(trainer, 3)
    trainer.send(mine, split(2))
    assert holds(trainer.verify(mine), mine)


# Strangers.


def test_another_secret_is_refused_by_both_sides(running, tmp_path):
    path = tmp_path / "other"
    path.write_text("x" * 20)
    path.chmod(0o600)
    with pytest.raises(Refused, match="it has another secret"):
        connect(running.address, read_secret(path, "test"), Deadline(WAIT_S))


def test_what_is_no_receiver_is_not_trusted(key):
    """A server that answers without knowing the secret, and one that is something else."""
    for answer, words in (
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "no receiver of weights"),
        (None, "does not know the secret"),
    ):
        with socket.create_server(("127.0.0.1", 0)) as server:

            def serve(server=server, answer=answer):
                connection, _ = server.accept()
                with connection:
                    connection.sendall(answer or channel._GREETING + bytes(32) + b"\x01" + bytes(32))
                    connection.recv(2**16)

            thread = threading.Thread(target=serve)
            thread.start()
            with pytest.raises(Refused, match=words):
                connect(server.getsockname()[:2], key, Deadline(WAIT_S))
            thread.join()


def test_garbage_and_silence_disturb_nobody(running, key, trainer, monkeypatch):
    monkeypatch.setattr(receiver, "_MOST_STRANGERS", 8)
    silent = [socket.create_connection(running.address) for _ in range(30)]
    for number in range(10):
        with socket.create_connection(running.address) as stranger:
            stranger.sendall(os.urandom(number * 1000))
    image = image_of(1)
    assert holds(trainer.bring(1, image), image)
    for number, stranger in enumerate(silent):
        stranger.settimeout(WAIT_S)
        if number < 20:
            assert stranger.recv(1) == b""  # hung up on
        stranger.close()
    assert holds(trainer.bring(2, image), image)


class Tampering:
    """A connection in between that changes one byte of what the trainer sends."""

    def __init__(self, target, at):
        self.server = socket.create_server(("127.0.0.1", 0))
        self.address = self.server.getsockname()[:2]
        self.thread = threading.Thread(target=self._run, args=(target, at))
        self.thread.start()

    def _run(self, target, at):
        here, _ = self.server.accept()
        there = socket.create_connection(target)
        back = threading.Thread(target=self._copy, args=(there, here, None))
        back.start()
        self._copy(here, there, at)
        back.join()
        here.close()
        there.close()

    @staticmethod
    def _copy(source, sink, at):
        passed = 0
        while True:
            try:
                data = bytearray(source.recv(2**16))
            except OSError:
                data = b""
            if not data:
                break
            if at is not None and passed <= at < passed + len(data):
                data[at - passed] ^= 1
            passed += len(data)
            try:
                sink.sendall(data)
            except OSError:
                break
        for end, how in ((sink, socket.SHUT_WR), (source, socket.SHUT_RD)):
            with contextlib.suppress(OSError):
                end.shutdown(how)

    def close(self):
        self.thread.join()
        self.server.close()


@pytest.mark.parametrize("at", [53 + 32 + 2000, 53 + 32 + 300], ids=["values", "spans"])
def test_a_byte_that_changes_on_the_way_is_noticed(trainer, at):
    image = image_of(1)
    trainer.begin(1)
    between = Tampering(trainer.address, at)
    straight, trainer.address = trainer.address, between.address
    with pytest.raises(Refused, match="was changed on its way"):
        trainer.send(image, split(1))
    between.close()
    trainer.address = straight
    with pytest.raises(Refused):
        trainer.verify(image)


def test_frames_beyond_the_limits_take_no_memory(trainer):
    link = connect(trainer.address, trainer.key, Deadline(WAIT_S))
    link._socket.sendall(channel._LENGTHS.pack(2**32 - 1, 2**60))
    with pytest.raises((Lost, Refused)):
        read_answer(link, Deadline(WAIT_S))
    link.close()
    image = image_of(1)
    assert holds(trainer.bring(1, image), image)


def test_a_receiver_that_does_not_answer_costs_the_deadline_and_no_more(key):
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts, and never says a word
        started = time.monotonic()
        with pytest.raises(Lost, match="no answer in time"):
            connect(server.getsockname()[:2], key, Deadline(0.3))
        assert 0.2 < time.monotonic() - started < 10


# The secret, addresses, and the command.


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("open", "can be read by others"),
        ("short", "must hold 16 to 4096 characters"),
        ("missing", "cannot be read"),
        ("folder", "cannot be read|is not a regular file"),
        ("pipe", "is not a regular file"),
    ],
)
def test_a_secret_file_that_cannot_be_used(tmp_path, how, words):
    path = tmp_path / "secret"
    if how == "folder":
        path.mkdir(mode=0o700)
    elif how == "pipe":
        os.mkfifo(path, 0o600)
    elif how != "missing":
        path.write_text("short" if how == "short" else SECRET)
        path.chmod(0o644 if how == "open" else 0o600)
    with pytest.raises(ShardproofError, match=words) as error:
        read_secret(path, "receive")
    assert SECRET not in str(error.value)


@pytest.mark.parametrize("address", ["", "host", "host:", ":80", "host:x", "host:99999", "host:-1"])
def test_an_address_that_is_none(address):
    with pytest.raises(ShardproofError, match="C001 receive: --listen"):
        parse_address(address, "receive", "--listen")


def test_addresses():
    assert parse_address("10.0.0.2:80", "s", "k") == ("10.0.0.2", 80)
    assert parse_address("[::1]:0", "s", "k") == ("::1", 0)


def test_the_command_listens_on_loopback_alone_and_ends_at_a_signal(secret, key):
    command = [
        sys.executable,
        "-m",
        "shardproof",
        "receive",
        "--listen",
        "127.0.0.1:0",
        "--secret-file",
        str(secret),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        assert line.startswith("receiving weights on 127.0.0.1:")
        assert all_loopback(listening([process.pid])) and listening([process.pid])
        host, port = line.split()[-1].rsplit(":", 1)
        image = image_of(1)

        class Command:
            address = (host, int(port))

        trainer = Trainer(Command, key)
        receipt = trainer.bring(1, image)
        assert holds(receipt, image)
        trainer.close()
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0
        assert "version 1 is committed" in log
    assert not os.path.exists(receipt["address"]["path"])  # the memory ends with it
