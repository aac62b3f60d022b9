"""Rewards: the built-in ones, and the user's in worker processes that hang, die and lie."""

import contextlib
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from decimal import Decimal

import psutil
import pytest

import shardproof.rl.rewards.jobs as reward_jobs
from shardproof.errors import ConfigError, RolloutFault
from shardproof.rl.rewards.answers import Regex, exact_match, numeric
from shardproof.rl.rewards.calling import Outcome
from shardproof.rl.rewards.functions import find_reward
from shardproof.rl.rewards.runner import RewardRunner, RewardSpec
from shardproof.rollout.trajectory import Reward

# Long enough for a busy machine to answer an honest call in.
TIMEOUT_S = 1.0
LONG_S = 30.0  # longer than anything here takes, unless it waits for what never comes

USERS = '''
import os, re, subprocess, sys, time

NOT_A_FUNCTION = 3

def length(prompt, completion, row):
    return len(completion)

def pid(prompt, completion, row):
    return os.getpid()

def obey(prompt, completion, row):
    """Does what the completion says."""
    if completion == "hang":
        time.sleep(1000)
    if completion == "hang with a child":
        subprocess.run([sys.executable, "-c", "import time; time.sleep(1000)"])
    if completion == "die":
        os._exit(3)
    if completion == "leave":
        sys.exit(0)
    if completion == "raise":
        raise KeyError("no such thing")
    values = {"nan": float("nan"), "inf": float("inf"), "none": None, "text": "1.0", "huge": 10**400, "true": True}
    return values[completion] if completion in values else float(completion)

def spoil(prompt, completion, row):
    """Changes its row, at the top and below; whoever gets the same row next would return more."""
    row["seen"] = row.get("seen", 0) + 1
    row["turns"].append(completion)
    return row["seen"] + len(row["turns"])

def spoil_again(prompt, completion, row):
    return spoil(prompt, completion, row)

def fork(prompt, completion, row):
    """The child comes back as well, by a value or by an exception."""
    if os.fork() == 0:
        if completion == "raise":
            raise KeyError("the child")
        return -1.0
    return float(row["n"])

def leave_running(prompt, completion, row):
    """Says which process it leaves behind, then holds the interpreter lock without end."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    print(os.getpid(), child.pid, flush=True)
    re.match("(a+)+$", "a" * 60 + "b")

class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no words")

def mute(prompt, completion, row):
    raise Mute

def two_arguments(prompt, completion):
    return 0.0

class Judge:
    def __call__(self, prompt, completion, row):
        return 0.5

judge = Judge()
'''


@pytest.fixture(autouse=True)
def users(user_module):
    return user_module("users_rewards", USERS)


@pytest.fixture
def no_process_left():
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= before


def samples_of(*completions):
    return [("a prompt", completion, {}) for completion in completions]


def make_runner(name, **settings):
    return RewardRunner([RewardSpec(f"users_rewards:{name}")], **{"timeout_s": TIMEOUT_S, **settings})


def run_python(program, **settings):
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], text=True, **settings)


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [(" 42\n", "42", 1.0), ("42", 42, 1.0), ("42.", "42", 0.0), ("", "42", 0.0), ("yes", " yes\n", 1.0)],
)
def test_exact_match(completion, answer, value):
    assert exact_match("", completion, {"answer": answer}) == value


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [
        ("so 7 + 5 = 12.", "12", 1.0),
        ("12 or maybe 13", 12, 0.0),
        ("$1,234.50 in all", "1234.5", 1.0),
        ("the list 1,2,3", 3, 1.0),
        ("10-3", 3, 1.0),
        (r"\boxed{-18}", -18, 1.0),
        ("x = \u22124", -4, 1.0),
        ("0.1 + 0.2 = 0.30000000000000004", 0.3, 1.0),
        (".5", "0.5", 1.0),
        ("1e3", 1000, 1.0),
        ("nothing", 0, 0.0),
        ("18", "16 - 3 = 13; 13 + 5 = 18\n#### 18", 1.0),
        ("9" * 500, 9, 0.0),
        ("word " * 10000 + "6" + " word" * 10000, 6, 1.0),
        # Of these, floats do not tell the right from the wrong.
        ("it is 12345678901234567890", 12345678901234567890, 1.0),
        ("it is 12345678901234567891", 12345678901234567890, 0.0),
        ("-12,345,678,901,234,567,891.0", "-12345678901234567891", 1.0),
        ("-12345678901234567890", "so it is -12345678901234567891", 0.0),
        ("100000000000000000000", "1e20", 1.0),
        ("9007199254740993", Decimal("9007199254740992"), 0.0),
        ("12345678901234567890", 12345678901234567890.0, 1.0),  # whose last digits nobody knows
    ],
)
def test_numeric_compares_the_last_number(completion, answer, value):
    assert numeric("", completion, {"answer": answer}) == value


def test_regex_takes_its_pattern_from_the_row_or_from_its_name():
    assert Regex(r"\d+")("", "room 101", {}) == 1.0
    assert Regex()("", "room 101", {"pattern": "^room"}) == 1.0
    assert find_reward("regex(^10:1)").now([("", "room 10:1", {})]) == [Outcome(0.0)]
    assert find_reward("regex").now([("", "a", {"pattern": "b"})]) == [Outcome(0.0)]
    spec = RewardSpec("regex", options={"pattern": "b$"})
    assert find_reward(spec).now([("", "ab", {})]) == [Outcome(1.0)]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("exact_mach", "Did you mean 'exact_match'?"),
        ("", "is not one of exact_match, numeric, math_verify, regex"),
        ("users_rewards:", "module:function"),
        ("users_rewards:lengthy", "Did you mean 'length'?"),
        ("users_rewards:NOT_A_FUNCTION", "3 is not a callable object"),
        ("users_rewards:two_arguments", "cannot be called as (prompt, completion, row)"),
        ("no_such_module_at_all:f", "No module named 'no_such_module_at_all'"),
        ("broken_rewards:f", "RuntimeError: not today (broken_rewards.py:1)"),
        ("regex(a[)", "unterminated character set"),
    ],
)
def test_a_name_that_stands_for_nothing_is_refused(users, name, said):
    (users / "broken_rewards.py").write_text("raise RuntimeError('not today')")
    with pytest.raises(ConfigError) as caught:
        find_reward(name)
    assert caught.value.code == "C001" and said in str(caught.value)


def test_a_reward_is_found_in_the_folder_that_the_run_starts_in(tmp_path, monkeypatch):
    (tmp_path / "local_rewards.py").write_text("def f(prompt, completion, row):\n    return 2.0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    assert find_reward("local_rewards:f").now([("", "", {})]) == [Outcome(2.0)]


def test_totals_are_weighted_and_in_order(no_process_left):
    specs = [RewardSpec("numeric", 2.0), RewardSpec("users_rewards:length", 0.5), RewardSpec("regex(7$)")]
    samples = [("", f"{'x' * n} {n}", {"answer": n if n % 2 else -1}) for n in range(300)]
    with RewardRunner(specs) as runner:
        for n, scored in enumerate(runner.score(samples)):
            length, matches = len(samples[n][1]), float(n % 10 == 7)
            parts = {"numeric": float(n % 2), "users_rewards:length": length, "regex(7$)": matches}
            assert scored.parts == parts and scored.errors == ()
            assert scored.total == 2.0 * (n % 2) + 0.5 * length + matches
        assert runner.score([]) == []


def test_a_sample_is_marked_as_failed_if_a_reward_that_counts_failed():
    samples = [("", "3", {"answer": 3}), ("", "3", {"answer": "many"}), ("", "4", {"answer": 4})]
    with RewardRunner([RewardSpec("numeric"), RewardSpec("exact_match")]) as runner:
        assert [one.failed for one in runner.score(samples)] == [False, True, False]
    with RewardRunner([RewardSpec("numeric", 0.0), RewardSpec("exact_match")]) as runner:
        scored = runner.score(samples)
    # A weight of 0 is for a reward that is looked at only; its failures are recorded and change no total.
    assert not any(one.failed for one in scored) and [len(one.errors) for one in scored] == [0, 1, 0]


def test_built_in_rewards_need_no_process(no_process_left):
    with RewardRunner([RewardSpec("numeric")]) as runner:
        assert not runner.pool.workers
        scored = runner.score([("", "3", {"answer": 3}), ("", "3", {}), ("", "3", {"answer": "many"})])
    assert [one.total for one in scored] == [1.0, 0.0, 0.0]
    assert scored[1].errors == ("numeric: ValueError: the row has no 'answer'",)
    assert scored[2].errors == ("numeric: ValueError: the answer 'many' holds no number",)


def test_samples_are_spread_over_the_workers_and_not_in_this_process():
    with make_runner("pid", num_workers=2) as runner:
        pids = {scored.total for scored in runner.score(samples_of(*["x"] * 64))}
        assert pids == {worker.process.pid for worker in runner.pool.workers} and len(pids) == 2


def test_failures_cost_their_own_sample_only(no_process_left):
    wrong = {
        "raise": "KeyError: 'no such thing' (users_rewards.py:23)",
        "leave": "SystemExit: 0 (users_rewards.py:21)",
        "nan": "returned nan, expected a finite number",
        "inf": "returned inf, expected a finite number",
        "text": "returned str, expected a number",
        "huge": "OverflowError: int too large to convert to float",
        "die": "its worker process died (exit code 3)",
        "hang": "no answer in 1 s",
    }
    completions = [str(n) for n in range(40)]
    for place, completion in enumerate(wrong):
        completions.insert(4 * place + 1, completion)
    with make_runner("obey") as runner:
        scored = runner.score(samples_of(*completions))
        assert runner.score(samples_of("true", "7"))[1].total == 7.0
    for completion, one in zip(completions, scored, strict=True):
        value = 0.0 if completion in wrong else float(completion)
        assert (one.total, one.parts) == (value, {"users_rewards:obey": value})
        assert one.errors == ((f"users_rewards:obey: {wrong[completion]}",) if completion in wrong else ())


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_a_reward_that_changes_its_row_changes_it_for_nobody_else(num_workers):
    row = {"turns": ["x"]}  # the samples of a group have one row between them
    specs = [RewardSpec("users_rewards:spoil"), RewardSpec("users_rewards:spoil_again")]
    with RewardRunner(specs, num_workers=num_workers) as runner:
        scored = runner.score([("a prompt", str(n), row) for n in range(100)])
    assert {tuple(one.parts.values()) for one in scored} == {(3.0, 3.0)} and row == {"turns": ["x"]}


@pytest.mark.parametrize("completion", ["return", "raise"])
def test_the_child_of_a_reward_that_forks_does_not_answer(completion, no_process_left):
    with make_runner("fork", num_workers=1, timeout_s=LONG_S) as runner:
        scored = runner.score([("", completion, {"n": n}) for n in range(40)])
        assert [one.total for one in scored] == list(range(40))
        assert [one.total for one in runner.score([("", completion, {"n": 7})])] == [7.0]


def test_a_module_that_forks_when_imported_has_one_worker(users, no_process_left):
    (users / "forking.py").write_text("import os\nos.fork()\ndef f(p, c, row): return row['n']")
    with RewardRunner([RewardSpec("forking:f")], num_workers=1, timeout_s=LONG_S) as runner:
        assert [one.total for one in runner.score([("", "", {"n": n}) for n in range(9)])] == list(range(9))


def test_an_error_without_words_is_recorded_like_any_other():
    with make_runner("mute", num_workers=1) as runner:
        (scored,) = runner.score(samples_of("x"))
    assert scored.errors[0].startswith("users_rewards:mute: Mute: ")


def test_samples_that_hang_one_after_another_are_each_found(no_process_left):
    with make_runner("obey", timeout_s=0.5, num_workers=1) as runner:
        began = time.monotonic()
        scored = runner.score(samples_of("hang", "1", "hang"))
        assert time.monotonic() - began < 10
    assert [len(one.errors) for one in scored] == [1, 0, 1]


def test_what_a_reward_started_ends_with_it(no_process_left):
    with make_runner("obey", timeout_s=0.3, num_workers=1) as runner:
        worker = psutil.Process(runner.pool.workers[0].process.pid)
        (scored,) = runner.score(samples_of("hang with a child"))
        assert scored.errors and not worker.is_running()
    until = time.monotonic() + LONG_S  # a process that was killed is there until the kernel has come to it
    while (left := _members(worker.pid)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not left


def _members(group):
    """The living processes of a group."""
    found = [each for each in psutil.process_iter(["status"]) if _group(each.pid) == group]
    return [each for each in found if each.info["status"] != psutil.STATUS_ZOMBIE]


def _group(pid):
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def test_a_pattern_without_end_is_cut_off(no_process_left):
    with RewardRunner([RewardSpec("regex((a+)+$)")], timeout_s=0.6) as runner:
        scored = runner.score(samples_of("a" * 60 + "b", "a"))
    assert [one.total for one in scored] == [0.0, 1.0] and "no answer" in scored[0].errors[0]


@pytest.mark.parametrize("wrong", ["raise", "die", "hang"])
def test_stop_names_the_reward_and_the_sample_and_leaves_no_stale_answer(wrong, no_process_left):
    with make_runner("obey", on_error="stop") as runner:
        with pytest.raises(RolloutFault) as caught:
            runner.score(samples_of(*["1"] * 10, wrong, *["1"] * 50))
        assert caught.value.code == "R504"
        assert "'users_rewards:obey' failed on sample 10" in str(caught.value)
        assert [one.total for one in runner.score(samples_of("2", "3"))] == [2.0, 3.0]


def test_stop_holds_for_built_in_rewards_too():
    runner = RewardRunner([RewardSpec("exact_match")], on_error="stop")
    with pytest.raises(RolloutFault, match=r"sample 1 .*the row has no 'answer'"):
        runner.score([("", "", {"answer": ""}), ("", "", {})])


def test_workers_that_die_between_batches_are_replaced_without_blame(no_process_left):
    with make_runner("length") as runner:
        for worker in runner.pool.workers:
            worker.process.kill()
            worker.process.wait()
        assert [one.errors for one in runner.score(samples_of("a", "b"))] == [(), ()]


def test_a_stopped_worker_does_not_block_the_rank_that_writes_to_it(no_process_left):
    with make_runner("length", timeout_s=1.0, num_workers=1) as runner:
        os.kill(runner.pool.workers[0].process.pid, signal.SIGSTOP)
        scored = runner.score(samples_of("x" * 4_000_000, "x"))
    assert [one.total for one in scored] == [0.0, 1.0]


def test_a_module_that_cannot_be_imported_stops_the_start(users, no_process_left):
    with pytest.raises(ConfigError, match="Did you mean 'length'"):
        make_runner("lengthy")
    (users / "deadly.py").write_text("import os\nos._exit(7)")
    with pytest.raises(RolloutFault, match=r"did not start: its worker process died \(exit code 7\)"):
        RewardRunner([RewardSpec("deadly:f")])


def test_a_module_whose_import_hangs_stops_the_start(users, monkeypatch, no_process_left):
    monkeypatch.setattr(reward_jobs, "START_S", 0.3)
    (users / "endless.py").write_text("import time\ntime.sleep(1000)")
    with pytest.raises(RolloutFault, match=r"did not start: no answer in 0\.3 s"):
        RewardRunner([RewardSpec("endless:f")])


def test_an_import_may_take_longer_than_a_call(users):
    (users / "slow.py").write_text("import time\ntime.sleep(0.6)\ndef f(p, c, r): return 1")
    with RewardRunner([RewardSpec("slow:f")], timeout_s=0.5, num_workers=1) as runner:
        assert runner.score(samples_of("x"))[0].total == 1.0


def test_without_functions_a_total_is_zero_for_an_environment_to_add_to():
    with RewardRunner([]) as runner:
        assert runner.score(samples_of("x", "y")) == [Reward(0.0), Reward(0.0)]


@pytest.mark.parametrize(
    ("specs", "settings", "said"),
    [
        ([RewardSpec("numeric"), RewardSpec("numeric")], {}, "twice"),
        ([RewardSpec("numeric", math.nan)], {}, "weight"),
        ([RewardSpec("numeric")], {"timeout_s": 0.0}, "timeout_s=0.0"),
        ([RewardSpec("numeric")], {"num_workers": 0}, "num_workers=0"),
        ([RewardSpec("numeric")], {"on_error": "zeros"}, "Did you mean 'zero'?"),
    ],
)
def test_impossible_settings_are_refused(specs, settings, said):
    with pytest.raises(ConfigError) as caught:
        RewardRunner(specs, **settings)
    assert said in str(caught.value)


def test_workers_leave_with_a_rank_that_is_killed(users):
    program = f"""
        import sys
        sys.path.insert(0, {str(users)!r})
        from shardproof.rl.rewards.runner import RewardRunner, RewardSpec
        runner = RewardRunner([RewardSpec("users_rewards:obey")], timeout_s=100.0)
        print(*(worker.process.pid for worker in runner.pool.workers), flush=True)
        runner.score([("", "hang", {{}})])
    """
    rank = run_python(program, stdout=subprocess.PIPE)
    pids = [int(pid) for pid in rank.stdout.readline().split()]
    assert len(pids) == 2 and all(psutil.pid_exists(pid) for pid in pids)
    rank.kill()
    rank.communicate()
    until = time.monotonic() + 10
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(psutil.pid_exists, pids))


def test_a_worker_that_holds_the_interpreter_lock_leaves_with_its_rank_and_with_what_it_started(users):
    program = f"""
        import sys
        sys.path.insert(0, {str(users)!r})
        from shardproof.rl.rewards.runner import RewardRunner, RewardSpec
        runner = RewardRunner([RewardSpec("users_rewards:leave_running")], timeout_s=1000.0, num_workers=1)
        runner.score([("", "", {{}})])
    """
    rank = run_python(program, stdout=subprocess.PIPE)
    left = [psutil.Process(int(pid)) for pid in rank.stdout.readline().split()]
    assert len(left) == 2
    rank.kill()
    rank.wait()
    try:
        assert not psutil.wait_procs(left, timeout=LONG_S)[1]
    finally:
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        rank.stdout.close()


def test_a_script_without_a_main_guard_is_not_run_again_in_the_workers(users):
    script = users / "train.py"
    script.write_text(
        "print('run')\n"
        "from shardproof.rl.rewards.runner import RewardRunner, RewardSpec\n"
        "runner = RewardRunner([RewardSpec('users_rewards:judge')])\n"
        "print(runner.score([('', '', {})])[0].total)\n"
    )
    # No close(): the workers must not keep the interpreter from leaving either.
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "run\n0.5\n", "")


def test_workers_start_below_a_daemonic_process(users):
    program = f"""
        import multiprocessing, sys
        sys.path.insert(0, {str(users)!r})
        from shardproof.rl.rewards.runner import RewardRunner, RewardSpec
        def score():
            with RewardRunner([RewardSpec("users_rewards:judge")], num_workers=1) as runner:
                assert runner.score([("", "", {{}})])[0].total == 0.5
        rank = multiprocessing.get_context("fork").Process(target=score, daemon=True)
        rank.start()
        rank.join()
        sys.exit(rank.exitcode)
    """
    assert run_python(program).wait(60) == 0


def test_a_worker_imports_neither_torch_nor_numpy():
    program = "import sys, shardproof.rl.rewards.workers; assert not {'torch', 'numpy', 'pydantic'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
