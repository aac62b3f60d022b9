"""The judge over HTTP: what it is asked, how fast, how often, and what becomes of servers that misbehave."""

import asyncio
import datetime
import json
import socket
import time

import pytest

from shardproof.errors import ConfigError, RolloutFault
from shardproof.rl.rewards import async_workers
from shardproof.rl.rewards.functions import find_reward, row_problem
from shardproof.rl.rewards.judge_limits import Cache, Pace
from shardproof.rl.rewards.runner import RewardRunner
from shardproof.rl.rewards.specs import RewardSpec, Surroundings
from tests.rl.rewards.judge_server import JudgeServer

KEY = "sk-very-secret"


@pytest.fixture
def server():
    with JudgeServer() as server:
        yield server


def judge_of(server, around=None, **options):
    given = {"url": server.url, "model": "judge", "backoff_s": 0.01, **options}
    return find_reward(RewardSpec("judge", options=given), around)


def ask(judge, *told, row=None, prompt="What?"):
    """What the judge says about completions that tell the server what to do."""

    async def every():
        samples = [[(prompt, f"An answer. <<{each}>>", row or {"answer": "four"})] for each in told]
        return [found[0] for found in await asyncio.gather(*map(judge.later, samples))]

    return asyncio.run(every())


def test_the_judge_reads_the_template_and_its_score_is_scaled(server):
    judge = judge_of(server, system="Be fair.", temperature=0.5, max_tokens=9, body={"seed": 3})
    (found,) = ask(judge, "say Good {answer}. Score: 7.5")
    assert found.value == 0.75 and found.error is None
    assert found.facts["cached"] == 0 and found.facts["retries"] == 0 and found.facts["tokens"] == 30
    (asked,) = server.asked
    system, user = asked.pop("messages")
    assert asked == {"model": "judge", "temperature": 0.5, "max_tokens": 9, "seed": 3}
    assert system == {"role": "system", "content": "Be fair."}
    # What a completion holds in braces is not filled in.
    assert "Question:\nWhat?\n" in user["content"] and "Good {answer}." in user["content"]
    assert "Reference answer:\nfour\n" in user["content"]


def test_the_default_template_rates_on_the_scale(server):
    for scale, ends in (
        ([0, 10], "from 0 (wrong) to 10 (right"),
        ([-1, 2.5], "from -1 (wrong) to 2.5 (right"),
    ):
        ask(judge_of(server, scale=scale), "say Score: 1")
        assert ends in server.asked[-1]["messages"][0]["content"]


def test_a_service_with_a_query_in_its_address_and_another_name_for_the_limit(server):
    for end in ("?version=1", "/", "/chat/completions/?version=1", "/chat/completions"):
        judge = judge_of(server, url=server.url + end, cache=False, body={"max_completion_tokens": 5})
        (found,) = ask(judge, "a")
        assert found.value == 0.7 and "max_tokens" not in server.asked[-1]
    query = "?version=1"
    assert server.paths == [f"/v1/chat/completions{each}" for each in (query, "", query, "")]


@pytest.mark.parametrize(
    ("said", "options", "value"),
    [
        ("Score: 0", {}, 0.0),
        ("score = 10", {}, 1.0),
        ("First Score: 2, no, **Score:** 3", {}, 0.3),
        ("**Score (0-10):** 8", {}, 0.8),
        ("Score (8)", {}, 0.8),
        ("Score: -3", {"scale": [-5, 5]}, 0.2),
        ("**Score:** \u22122.5 of 5", {"scale": [-5, 5]}, 0.25),
        ("Score - .5", {}, 0.05),
        ("Score: -3", {}, "the judge's score -3 is not from 0 to 10"),
        ('{"score": 1' + "0" * 400 + "}", {"json_key": "score"}, "holds no score"),
        ("[[4]]", {"pattern": r"\[\[(\d+)\]\]", "scale": [1, 5]}, 0.75),
        ('{"score": 1} then ```{"why": {"a": 1}, "score": "4"}```', {"json_key": "score"}, 0.4),
        ("Score: 11", {}, "the judge's score 11 is not from 0 to 10"),
        ("I cannot say.", {}, "the judge's answer holds no score: 'I cannot say.'"),
        ('{"score": true}', {"json_key": "score"}, "holds no score"),
        ('{"score": NaN}', {"json_key": "score"}, "holds no score"),
    ],
)
def test_scores_are_found_in_what_judges_write(server, said, options, value):
    (found,) = ask(judge_of(server, **options), f"say {said}")
    if isinstance(value, str):
        assert value in found.error and found.value == 0.0
    else:
        assert found.error is None and found.value == pytest.approx(value)


def test_a_server_that_is_busy_or_down_is_asked_again(server):
    found = ask(judge_of(server, retries=3), "busy 2", "down 3", "busy 1 0.2", "chunked", "parts")
    assert [one.value for one in found] == [0.7] * 5 and [one.error for one in found] == [None] * 5
    assert [one.facts["retries"] for one in found] == [2, 3, 1, 0, 0]


def test_an_answer_that_ends_with_the_connection_is_read_to_its_end(server):
    (found,) = ask(judge_of(server, retries=0), "unsized")
    assert (found.value, found.error) == (0.7, None)


def test_what_a_server_sends_before_its_answer_is_not_the_answer(server):
    (found,) = ask(judge_of(server, retries=0), "hints")
    assert (found.value, found.error) == (0.7, None)


def test_a_server_that_reads_nothing_is_given_up_in_time():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        options = {"url": url, "model": "judge", "timeout_s": 0.5, "retries": 0, "cache": False}
        judge = find_reward(RewardSpec("judge", options=options))
        long = "x" * 20_000_000  # more than the kernel takes on the way
        (found,) = asyncio.run(asyncio.wait_for(judge.later([("", long, {"answer": 1})]), 60))
    assert found.error == "RuntimeError: the judge did not answer in 0.5 s, in 1 attempts"


@pytest.mark.parametrize("usage", ["-1000000000", "1e999", "1" + "0" * 400, "[1]", "NaN", '"many"', "true"])
def test_what_a_server_says_of_tokens_cannot_stop_the_requests_that_follow(server, usage):
    judge = judge_of(server, tokens_per_minute=60_000_000)
    for given in (f'{{"total_tokens":{usage}}}', usage):
        (found,) = ask(judge, f"usage {given}")
        assert found.error is None and found.facts["tokens"] in (0, 1)
    (found,) = ask(judge, "usage null")
    assert found.value == 0.7


def test_a_server_that_says_when_to_come_back_is_left_alone_until_then(server):
    judge = judge_of(server)
    ask(judge, "busy 1 0.5")
    assert server.times[1] - server.times[0] >= 0.5


def test_a_server_that_says_to_come_back_at_once_is_asked_after_the_usual_wait(server):
    (found,) = ask(judge_of(server, backoff_s=0.4), "busy 1 0")
    assert found.value == 0.7 and server.times[1] - server.times[0] >= 0.2


def test_no_score_is_read_from_an_answer_that_was_cut_off(server, tmp_path):
    """It is one that the judge quotes, or the beginning of another."""
    judge = judge_of(server, Surroundings(folder=str(tmp_path)))
    for told in ('limit say The answer claims "Score: 10", but', "limit say Score: 1", "limit"):
        for _ in range(2):
            (found,) = ask(judge, told)
            assert found.error.startswith(
                "RuntimeError: the judge's answer was cut off at its limit of tokens"
            )
    assert set(server.seen.values()) == {2}  # neither asked again by itself, nor kept


def test_servers_that_never_answer_well_are_failures_that_say_why(server):
    judge = judge_of(server, retries=1, timeout_s=2.0)
    found = ask(judge, "hang", "cut", "noise", "html", "error", "silence", "deep", "busy 9", "down 9")
    assert [one.error for one in found] == [
        "RuntimeError: the judge did not answer in 2 s, in 2 attempts",
        "RuntimeError: the judge cannot be reached: the server's answer ended too early, or is too long, in 2 attempts",
        "RuntimeError: the judge cannot be reached: the server did not answer in HTTP, in 2 attempts",
        "RuntimeError: the judge's answer is not that of a chat completion: <html>it works</html>, in 2 attempts",
        'RuntimeError: the judge\'s answer is not that of a chat completion: {"error": "no credit"}, in 2 attempts',
        "RuntimeError: the judge's answer has no text, in 2 attempts",
        f"RuntimeError: the judge's answer is not that of a chat completion: {'[' * 200}, in 2 attempts",
        "RuntimeError: the judge answered with status 429: slow down, in 2 attempts",
        "RuntimeError: the judge answered with status 503, in 2 attempts",
    ]
    assert set(server.seen.values()) == {2}


def test_a_server_that_is_elsewhere_says_where(server):
    """The key and the completions go nowhere but where the recipe says."""
    (found,) = ask(judge_of(server), "moved")
    said = "the judge's server says that it is at https://elsewhere/v1/chat/completions: name it in url"
    assert found.error.startswith(f"RuntimeError: {said}")
    assert len(server.asked) == 1


def test_a_server_that_is_not_there(server):
    judge = judge_of(server, retries=0)
    server.shutdown()
    server.socket.close()
    (found,) = ask(judge, "x")
    assert found.error.startswith("RuntimeError: the judge cannot be reached: ")


def test_the_key_is_sent_and_never_shown(server, monkeypatch, tmp_path):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    judge = judge_of(server, Surroundings(folder=str(tmp_path)), api_key_env="JUDGE_KEY")
    good, refused, echoed = ask(judge, "x", "refuse", f"say {KEY} is no score")
    assert good.value == 0.7 and server.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert refused.error == "RuntimeError: the judge answered with status 401: wrong key: Bearer ***"
    assert KEY not in echoed.error and "*** is no score" in echoed.error
    # A text that is cut in the middle of the key shows no part of it.
    cut = ask(judge, f"refuse {'x' * 180}", f"say {KEY} is no score{'.' * 180}")
    assert all("secret" not in one.error and "sk-" not in one.error for one in cut)
    assert len([*tmp_path.rglob("*.json")]) == 1
    assert not any(KEY in path.read_text() for path in tmp_path.rglob("*.json"))
    assert server.seen["refuse"] == 1  # it would be refused again
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ConfigError, match="the environment variable 'JUDGE_KEY' holds no key"):
        judge_of(server, api_key_env="JUDGE_KEY")


def test_what_was_judged_before_is_not_asked_again(server, tmp_path):
    around = Surroundings(folder=str(tmp_path / "run"))
    first = ask(judge_of(server, around), "a", "a", "say nothing")
    again = ask(judge_of(server, around), "a", "say nothing")
    other = ask(judge_of(server, around, model="another"), "a")
    assert [one.value for one in (*first[:2], again[0], other[0])] == [0.7] * 4
    # The same completion that is being judged waits for it; an answer without a score is not kept.
    assert [one.facts["cached"] for one in (*first[:2], again[0], other[0])] == [0, 1, 1, 0]
    assert server.seen == {"a": 2, "say nothing": 2}
    assert len([*(tmp_path / "run" / "judge").rglob("*.json")]) == 2
    # Another pattern reads its score from the same answer.
    (found,) = ask(judge_of(server, around, pattern=r"(\d+)$"), "a")
    assert (found.value, found.facts) == (0.7, {"cached": 1.0})
    # One that finds none there asks again.
    (found,) = ask(judge_of(server, around, pattern=r"Grade: (\d+)"), "a")
    assert "holds no score" in found.error and server.seen["a"] == 3
    # Another scale asks for another score, unless the user's own template is what asks.
    (found,) = ask(judge_of(server, around, scale=[0, 7]), "a")
    assert found.value == 1.0 and server.seen["a"] == 4
    for scale, value in ([0, 10], 0.7), ([0, 7], 1.0):
        (found,) = ask(judge_of(server, around, prompt="{completion}", scale=scale), "a")
        assert found.value == value and server.seen["a"] == 5
    (elsewhere,) = ask(judge_of(server, around, cache=str(tmp_path / "shared")), "a")
    (never,) = ask(judge_of(server, around, cache=False), "a")
    assert (elsewhere.facts["cached"], never.facts["cached"]) == (0, 0)


def test_a_folder_of_the_users_home_is_found_there(server, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    ask(judge_of(server, cache="~/judged"), "a")
    assert [*(tmp_path / "judged").rglob("*.json")]


def test_a_column_that_the_prompt_names_must_be_there(server):
    options = {"url": server.url, "model": "judge", "prompt": "{question} {completion} \\boxed{{N}}"}
    spec = RewardSpec("judge", options=options)
    for row in ({"answer": 1}, {"question": None}):
        assert "has no 'question', which the judge's prompt names" in row_problem(spec, row)
    assert row_problem(spec, {"question": "2+2"}) is None
    ask(find_reward(spec), "a", row={"question": "2+2"})
    assert server.asked[0]["messages"][0]["content"] == "2+2 An answer. <<a>> \\boxed{N}"


@pytest.mark.parametrize(
    "wrong",
    [
        {"url": 5},
        {"url": "http://host:99999/v1"},
        {"url": "http://me:secret@host/v1"},
        {"model": ["a"]},
        {"system": 1},
        {"json_key": 1},
        {"api_key_env": 5},
        {"cache": 5},
        {"prompt": "{{completion}}"},
        {"scale": [0, float("inf")]},
        {"body": {"since": datetime.date(2026, 1, 1)}},
    ],
)
def test_options_that_cannot_be_are_refused_by_name(wrong):
    options = {"url": "http://localhost/v1", "model": "judge", **wrong}
    with pytest.raises(ConfigError, match="reward 'judge': "):
        find_reward(RewardSpec("judge", options=options))


@pytest.mark.parametrize("scale", [5, "15", ["a", "b"], [False, 5], [1, 2, 3], [5, 1]])
def test_a_scale_is_two_numbers(scale):
    options = {"url": "http://localhost/v1", "model": "judge", "scale": scale}
    with pytest.raises(ConfigError, match=r"scale=.* is not the lowest and the highest score"):
        find_reward(RewardSpec("judge", options=options))


@pytest.mark.parametrize("key", ["model", "messages", "temperature", "max_tokens", "stream"])
def test_what_the_judge_is_asked_is_not_replaced_through_its_body(key):
    options = {"url": "http://localhost/v1", "model": "judge", "body": {"seed": 1, key: True}}
    with pytest.raises(ConfigError, match=f"body has '{key}': "):
        find_reward(RewardSpec("judge", options=options))


def test_a_cache_survives_broken_files_and_full_disks(tmp_path):
    cache, key = Cache(str(tmp_path)), Cache.key({"a": 1})
    assert key == Cache.key({"a": 1}) != Cache.key({"a": 2})
    assert cache.get(key) is None
    cache.put(key, {"text": "x"})
    (path,) = tmp_path.rglob("*.json")
    assert cache.get(key) == {"text": "x"} and [*path.parent.iterdir()] == [path]
    for broken in ("", "{", "[" * 100_000, "[]", '{"text": 3}', json.dumps({"text": "x"})[:-1]):
        path.write_text(broken)
        assert cache.get(key) is None
    Cache("/proc/nowhere").put(key, {"text": "x"})


class Clock:
    """Time that passes only where somebody waits."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    async def sleep(self, seconds):
        self.now += seconds


def times_of(pace, clock, *tokens):
    async def found():
        times = []
        for num in tokens:
            await pace.turn(num)
            times.append(clock.now - 100.0)
        return times

    return asyncio.run(found())


def test_requests_that_waited_for_a_pause_do_not_begin_together():
    clock, times = Clock(), []

    async def sleep(seconds):
        until = clock.now + seconds
        await asyncio.sleep(0)
        clock.now = max(clock.now, until)

    pace = Pace(60, None, clock, sleep)

    async def one():
        await pace.turn(1)
        times.append(clock.now - 100.0)
        if len(times) == 1:
            pace.pause(10)

    async def every():
        await asyncio.gather(*(one() for _ in range(4)))

    asyncio.run(every())
    assert times == pytest.approx([0, 10, 11, 12])


def test_requests_and_tokens_keep_their_pace():
    clock = Clock()
    assert times_of(Pace(60, None, clock, clock.sleep), clock, 9, 9, 9) == pytest.approx([0, 1, 2])
    clock = Clock()
    pace = Pace(60, 600, clock, clock.sleep)
    assert times_of(pace, clock, 30, 5, 5) == pytest.approx([0, 3, 4])  # by tokens, then by requests
    pace.correct(5, 105)  # it took more than was thought
    assert times_of(pace, clock, 1) == pytest.approx([14.5])
    pace.pause(20)
    pace.pause(1)
    assert times_of(pace, clock, 1) == pytest.approx([34.5])
    clock = Clock()
    assert times_of(Pace(None, None, clock, clock.sleep), clock, 10**9, 10**9) == [0, 0]


def test_ranks_share_the_limits_and_requests_of_a_rank_are_bounded(nothing_left, server):
    options = {"url": server.url, "model": "judge", "requests_per_minute": 2400, "cache": False}
    spec = RewardSpec("judge", label="fair", options=options, concurrency=3)
    with RewardRunner([spec], around=Surroundings(num_ranks=2)) as runner:
        began = time.monotonic()
        scored = runner.score([("", f"<<wait 0.2 {n}>>", {"answer": 1}) for n in range(8)])
    assert [one.parts for one in scored] == [{"fair": 0.7}] * 8 and server.most_at_once <= 3
    assert scored[0].facts.keys() == {"fair/cached", "fair/seconds", "fair/retries", "fair/tokens"}
    assert max(server.times) - began >= 7 * 0.05  # 1200 per minute for this rank


def test_a_judge_that_fails_follows_on_error(nothing_left, server):
    options = {"url": server.url, "model": "judge", "retries": 0, "timeout_s": 2.0}
    samples = [("", f"<<{told}>>", {}) for told in ("a", "hang")]
    with RewardRunner([RewardSpec("judge", options=options)]) as runner:
        assert [one.failed for one in runner.score(samples)] == [False, True]
    with (
        RewardRunner([RewardSpec("judge", options=options)], on_error="stop") as runner,
        pytest.raises(RolloutFault, match=r"'judge' failed on sample 1 .*did not answer in 2 s"),
    ):
        runner.score(samples)


def test_a_score_that_takes_forever_to_find_is_killed(nothing_left, server, monkeypatch):
    monkeypatch.setattr(async_workers, "_SILENT_S", 0.5)
    monkeypatch.setattr(async_workers, "_GRACE_S", 0.5)
    options = {"url": server.url, "model": "judge", "pattern": "((a+)+)$"}
    with RewardRunner([RewardSpec("judge", options=options)], timeout_s=0.5) as runner:
        (found,) = runner.score([("", f"<<say {'a' * 60}b>>", {})])
    assert found.errors == ("judge: no answer in 1 s",)
