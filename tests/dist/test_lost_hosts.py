"""What ranks learn of lost hosts, what they say of them, and how long every group waits for them."""

import json
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from shardproof.dist import lost, news, stacks
from shardproof.dist.deadline import HOST_NAMES, deadline, joining
from shardproof.dist.groups import keep_in_time, new_group, timeout_of
from shardproof.dist.hosts import Hosts
from shardproof.errors import ShardproofError
from tests.ranks import run_ranks

WAIT = lost.Wait("save", "T308", 6.0)
HOSTS = Hosts(("a", "b", "c"), (0, 0, 1, 1, 2, 2), rank=0)


def explain(monkeypatch, found, hosts=HOSTS, said=None):
    monkeypatch.setattr(lost, "known_hosts", lambda: hosts)
    return lost.explain(found, len(hosts.of_rank), said)


def test_a_host_that_does_not_answer_is_named_with_its_ranks(monkeypatch):
    message, fix = explain(monkeypatch, lost.Answers(WAIT, dict.fromkeys((0, 1, 4, 5), "barrier: x")))
    assert message == (
        "host b (ranks 2, 3) did not answer: cut off, frozen, died, or stuck outside Python. Ranks 0, 1 on "
        "host a and ranks 4, 5 on host c in barrier: x; ranks 2, 3 on host b did not answer"
    )
    assert "the network between the hosts" in fix


def test_single_ranks_of_a_host_that_answers_are_named(monkeypatch):
    message, _ = explain(monkeypatch, lost.Answers(WAIT, dict.fromkeys((0, 1, 2, 4), "barrier: x")))
    assert message.startswith("rank 3 on host b and rank 5 on host c did not answer: ")


def test_a_rank_that_cannot_ask_names_the_host_that_holds_the_store(monkeypatch):
    found = lost.Answers(WAIT, {3: "barrier: x"}, store_silent_s=5.0)
    message, _ = explain(monkeypatch, found, Hosts(HOSTS.names, HOSTS.of_rank, rank=3))
    assert message == (
        "host b (ranks 2, 3) lost the connection to host a (ranks 0, 1), which holds the run's store: no answer for 5 s. "
        "Rank 3 on host b in barrier: x"
    )


def test_what_the_launcher_says_goes_first(monkeypatch):
    found = lost.Answers(WAIT, dict.fromkeys(range(4), "barrier: x"))
    message, _ = explain(monkeypatch, found, said="host c was lost: not heard of for 30 s")
    assert message.startswith(
        "host c was lost: not heard of for 30 s. Ranks 0, 1 on host a and ranks 2, 3 on"
    )


@pytest.mark.parametrize(
    "content, said",
    [
        ('{"lost": ["b"], "seconds": 30}', "host b was lost: not heard of for 30 s"),
        ('{"lost": ["b", "c"], "seconds": 5.2}', "hosts b, c were lost: not heard of for 5 s"),
        ('{"lost": [], "seconds": 5}', "another host was lost: not heard of for 5 s"),
        ('{"lost": ["\\u001b[2Jb"], "seconds": 5}', "host \\x1b[2Jb was lost: not heard of for 5 s"),
        ("", "another host was lost"),
        ("[1, 2]", "another host was lost"),
    ],
)
def test_news(tmp_path, content, said):
    path = tmp_path / "news"
    path.write_text(content)
    assert news.read_news(path) == said


def hear_of_a_lost_host(path, fails):
    """A rank that needs no other for minutes, while its launcher says that a host is lost; its code may fail of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(news.VARIABLE, str(path))
        began = time.monotonic()
        try:
            with deadline("run", seconds=600), deadline("sync", "R505", seconds=500):
                path.write_text(json.dumps({"lost": ["b"], "seconds": 30}))
                work_alone(fails)
        except ShardproofError as error:
            return time.monotonic() - began, str(error), alone_for(3.0)


def work_alone(fails):
    try:
        while True:
            time.sleep(0.01)
    except news.Interrupted:
        if fails:
            raise ConnectionResetError("the request failed") from None
        raise


def alone_for(seconds):
    """Whether nothing interrupts this thread, now that its block is over."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.01)
    return [thread.name for thread in threading.enumerate() if thread.name == "shardproof news"] == []


@pytest.mark.distributed
@pytest.mark.parametrize("fails", [False, True])
def test_a_rank_that_waits_for_nobody_hears_of_a_lost_host(tmp_path, fails):
    for seconds, message, is_alone in run_ranks(2, hear_of_a_lost_host, tmp_path / "news", fails):
        assert seconds < 60
        assert message.startswith("T308 sync: host b was lost: not heard of for 30 s. ")
        assert is_alone


def calls_of_a_request():
    """How many calls to the store a rank makes when all of them lose a connection at once."""
    stacks.start()
    watch = stacks.current()
    dist.barrier()
    before = watch.num_calls
    found = watch.report(RuntimeError("connection closed by peer"), WAIT)
    return watch.num_calls - before, len(found.places)


@pytest.mark.distributed
def test_a_request_for_stacks_takes_a_few_calls_per_rank():
    for num_ranks in (3, 6):
        answers = run_ranks(num_ranks, calls_of_a_request)
        assert [num_places for _, num_places in answers] == [num_ranks] * num_ranks
        calls = sorted(num_calls for num_calls, _ in answers)
        assert calls[-2] <= 12, calls  # all but the one that reads the answers for the others
        assert calls[-1] <= 50 + num_ranks, calls


def timeouts_around_a_deadline():
    before = timeout_of(dist.group.WORLD)
    made_before = new_group([0, 1])
    with deadline("run", seconds=77):
        made = new_group(backend="gloo")
        by_torch = dist.new_group([0, 1])
        keep_in_time([by_torch])
        inside = [timeout_of(group) for group in (dist.group.WORLD, made, by_torch)]
        with deadline("step", seconds=33, groups=[made_before]):
            nested = [timeout_of(group) for group in (dist.group.WORLD, made_before)]
    after = [timeout_of(group) for group in (dist.group.WORLD, made_before, made, by_torch)]
    for group in (made_before, made, by_torch):
        dist.destroy_process_group(group)
    return inside, nested, [each == before for each in after]


@pytest.mark.distributed
def test_every_group_waits_as_long_as_the_deadline_says():
    expected = [timedelta(seconds=77)] * 3, [timedelta(seconds=33)] * 2, [True] * 4
    assert run_ranks(2, timeouts_around_a_deadline) == [expected] * 2


@pytest.mark.parametrize(
    "names, others",
    [
        ("[]", "the other ranks"),
        ('["a", "b"]', "the ranks of host a"),
        ('["a", "b", "c"]', "the ranks of hosts a, c"),
    ],
)
def test_hosts_that_cannot_meet_say_who_and_where(monkeypatch, names, others):
    known = {
        "RANK": "3",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        HOST_NAMES: names,
    }
    for name, value in known.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("socket.gethostname", lambda: "b")
    said = rf"rank 3 on host b could not join {others}, at 10\.0\.0\.1:29500, within 8 s: "
    with pytest.raises(ShardproofError, match=said), joining(8):
        raise RuntimeError("wait timeout after 8000ms")


def test_an_error_of_a_device_is_no_lost_host(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(torch.AcceleratorError), joining(8):
        raise torch.AcceleratorError("CUDA error: out of memory")
    with pytest.raises(ShardproofError, match="The backend says: RuntimeError"), joining(8):
        raise RuntimeError
