import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, RankTimeout, allow_several_ranks, run_ranks, run_ranks_outcomes

pytestmark = pytest.mark.distributed


def sum_of_ranks(offset):
    value = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(value)
    return value


def environment():
    return [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]


def process_id():
    return os.getpid()


def group_is_initialised():
    return dist.is_initialized()


def init_from_environment():
    dist.init_process_group("gloo")
    # A rank that is done before the other has connected would close the connection that the other waits for.
    dist.barrier()
    return dist.get_world_size()


def raise_on(rank):
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} refuses")
    return "fine"


def raise_everywhere():
    raise KeyError("agreed")


def end_on(rank, how):
    if dist.get_rank() == rank:
        how_to_end = {"exit": lambda: os._exit(7), "kill": lambda: os.kill(os.getpid(), signal.SIGKILL)}
        how_to_end[how]()
    return "alive"


def wait_on(rank):
    if dist.get_rank() == rank:
        time.sleep(600)


def leave_state_behind():
    torch.set_default_dtype(torch.bfloat16)
    torch.set_grad_enabled(False)
    os.environ["LEFT_BEHIND"] = "1"
    return torch.rand(3, dtype=torch.float32)


def state():
    return torch.get_default_dtype(), torch.is_grad_enabled(), "LEFT_BEHIND" in os.environ


def return_lambda():
    return lambda: None


def many_tensors(num_tensors):
    return [torch.full((4,), float(i), dtype=torch.bfloat16) for i in range(num_tensors)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_all_reduce(num_ranks):
    expected = float(sum(rank + 10 for rank in range(num_ranks)))
    assert [value.item() for value in run_ranks(num_ranks, sum_of_ranks, 10)] == [expected] * num_ranks


def test_ranks_have_the_environment_of_torchrun():
    assert run_ranks(2, environment) == [["0", "2", "0", "2"], ["1", "2", "1", "2"]]


def test_workers_are_kept():
    assert run_ranks(2, process_id) == run_ranks(3, process_id)[:2]


def test_without_a_process_group():
    assert run_ranks(2, group_is_initialised, init_group=False) == [False, False]
    assert run_ranks(2, group_is_initialised) == [True, True]


def test_a_function_can_make_its_own_group():
    assert run_ranks(2, init_from_environment, init_group=False) == [2, 2]
    assert run_ranks(2, sum_of_ranks, 0)[0].item() == 1.0


def test_a_call_leaves_no_state_behind():
    first = run_ranks(1, leave_state_behind)[0]
    assert run_ranks(1, state) == [(torch.float32, True, False)]
    assert torch.equal(run_ranks(1, leave_state_behind)[0], first)


def test_results_travel_by_value():
    # Through shared memory this many tensors would take as many file descriptors.
    results = run_ranks(1, many_tensors, 5000)[0]
    assert results[4096].dtype == torch.bfloat16
    assert results[4096][0].item() == 4096.0


def test_an_error_on_one_rank():
    with pytest.raises(RankError, match="rank 1 refuses") as caught:
        run_ranks(2, raise_on, 1)
    assert list(caught.value.errors) == [1]
    kind, message, trace = caught.value.errors[1]
    assert (kind, message) == ("ValueError", "rank 1 refuses")
    assert "in raise_on" in trace
    assert run_ranks(2, sum_of_ranks, 0)[0].item() == 1.0


def test_outcomes_do_not_raise():
    assert run_ranks_outcomes(2, raise_on, 0) == [("error", "ValueError", "rank 0 refuses"), ("ok", "fine")]
    assert run_ranks_outcomes(2, raise_everywhere) == [("error", "KeyError", "'agreed'")] * 2


def test_a_result_that_cannot_be_pickled_is_an_error():
    (outcome,) = run_ranks_outcomes(1, return_lambda)
    assert outcome[0] == "error"
    assert "lambda" in outcome[2]


@pytest.mark.parametrize(("how", "exitcode"), [("exit", 7), ("kill", -signal.SIGKILL)])
def test_a_rank_that_dies(how, exitcode):
    survivor, *_ = before = run_ranks(2, process_id)
    assert run_ranks_outcomes(2, end_on, 1, how) == [("ok", "alive"), ("died", exitcode)]
    after = run_ranks(2, process_id)
    assert after[0] == survivor
    assert after[1] != before[1]
    assert run_ranks(2, sum_of_ranks, 0)[1].item() == 1.0


def test_a_dead_rank_is_an_error():
    with pytest.raises(RankError, match="exit code 7") as caught:
        run_ranks(2, end_on, 0, "exit")
    assert caught.value.errors[0][0] == "died"


def test_a_timeout_shows_the_stack_of_the_rank_that_waits():
    before = run_ranks(2, process_id)
    with pytest.raises(RankTimeout, match="in wait_on") as caught:
        run_ranks(2, wait_on, 1, timeout=3)
    assert list(caught.value.errors) == [1]
    assert set(run_ranks(2, process_id)).isdisjoint(before)


def test_without_the_marker_a_test_gets_one_rank():
    allow_several_ranks(False)
    with pytest.raises(RuntimeError, match="a test on 2 ranks needs the marker `distributed`"):
        run_ranks(2, process_id)
    assert len(run_ranks(1, process_id)) == 1
