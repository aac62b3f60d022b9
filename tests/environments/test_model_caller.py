"""Programs that call a model, as conversations: with plain HTTP, and without any package of others."""

import asyncio
import json
import urllib.error
import urllib.request

import pytest

from shardproof.environments.model_caller import ModelCaller, shared_endpoint
from shardproof.environments.protocol import Opening, Reply, ToolCall, Turn


def post(url, body):
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request) as response:
        return response.read().decode()


async def ask(url, messages, **more):
    answer = await asyncio.to_thread(post, url, {"messages": messages, **more})
    return json.loads(answer)["choices"][0]


def user(text):
    return {"role": "user", "content": text}


def turn(text, *calls, **how):
    return Turn(text, text, calls=calls, **how)


def converse(program, *turns):
    """The opening and the replies of a program's conversation, and what it returned."""

    async def play():
        endpoint = await shared_endpoint()
        caller = ModelCaller(endpoint)
        caller.listen("one")
        found = [await caller.begin(program(endpoint.url_of("one")))]
        for each in turns:
            found.append(await caller.answer(each))
        result = await caller.work if found[-1] is None else None
        await caller.close()
        return found, result

    return asyncio.run(play())


def test_each_call_is_a_turn_and_only_what_is_new_is_said_again():
    async def program(url):
        messages = [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, user("hello")]
        first = await ask(url, messages)
        second = await ask(url, [*messages, first["message"], user("and now?")])
        return first["finish_reason"], second["message"]["content"]

    found, result = converse(program, turn("hi"), turn("bye", number=2))
    opening = Opening([{"role": "system", "content": "Be brief."}, user("hello")], [])
    assert found == [opening, Reply([user("and now?")]), None]
    assert result == ("stop", "bye")


def test_calls_of_tools_go_out_as_text_and_come_back_as_objects():
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]

    async def program(url):
        first = await ask(url, [user("2+2")], tools=tools)
        said = first["message"]
        result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "4"}
        last = await ask(url, [user("2+2"), said, result], tools=tools)
        return said["tool_calls"][0]["function"], last["message"]

    call = ToolCall("add", {"a": 2})
    found, (function, last) = converse(program, turn("", call), turn("4", number=2))
    assert found[0].tools == tools and function == {"name": "add", "arguments": '{"a": 2}'}
    assert found[1] == Reply([{"role": "tool", "content": "4", "tool_call_id": "call_1_0"}])
    assert last == {"role": "assistant", "content": "4"}


@pytest.mark.parametrize("how", ["rewritten", "another"])
def test_a_conversation_that_is_not_the_same_any_more_is_fresh(how):
    async def program(url):
        first = await ask(url, [user("a"), user("b")])
        said = {"role": "assistant", "content": "something else"} if how == "rewritten" else first["message"]
        await ask(url, [user("a"), user("b"), said, user("c")] if how == "rewritten" else [user("new")])

    found, _ = converse(program, turn("hi"), turn("x", number=2))
    assert found[1].fresh and found[1].messages[-1] == user("c" if how == "rewritten" else "new")


def test_behind_the_last_turn_the_program_is_told_that_it_is_over():
    async def program(url):
        first = await ask(url, [user("a")])
        try:
            await ask(url, [user("a"), first["message"], user("b")])
        except urllib.error.HTTPError as error:
            return first["finish_reason"], error.code, json.loads(error.read())["error"]["code"]

    found, result = converse(program, turn("hi", last=True, finished=False))
    assert found[1] is None and result == ("length", 400, "context_length_exceeded")


def test_a_stream_is_the_same_answer_in_pieces():
    async def program(url):
        return await asyncio.to_thread(post, url, {"messages": [user("a")], "stream": True})

    _, result = converse(program, turn("hi", ToolCall("add", {})))
    pieces = [line.removeprefix("data: ") for line in result.split("\n\n") if line]
    delta = json.loads(pieces[0])["choices"][0]["delta"]
    assert delta["content"] == "hi" and delta["tool_calls"][0]["index"] == 0
    assert json.loads(pieces[1])["choices"][0]["finish_reason"] == "tool_calls" and pieces[-1] == "[DONE]"


@pytest.mark.fault
def test_a_program_that_ends_or_raises_before_its_first_call():
    async def program(url):
        raise LookupError("no such thing")

    with pytest.raises(LookupError, match="no such thing"):
        converse(program)


@pytest.mark.fault
def test_requests_that_cannot_be_used_are_refused():
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}

    async def program(url):
        codes = []
        for place, messages in ((url, [image]), (url, [{}]), (url.replace("/one/", "/two/"), [user("a")])):
            try:
                await ask(place, messages)
            except urllib.error.HTTPError as error:
                codes.append((error.code, json.loads(error.read())["error"]["message"]))
        return codes

    _, codes = converse(program)
    assert [code for code, _ in codes] == [422, 422, 404]
    assert "content of type 'image_url' is not supported" in codes[0][1] and "'two'" in codes[2][1]


def test_closing_ends_a_program_that_waits():
    ended = []

    async def play():
        endpoint = await shared_endpoint()
        caller = ModelCaller(endpoint)
        caller.listen("waits")

        async def program():
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)

        begun = asyncio.ensure_future(caller.begin(program()))
        await asyncio.sleep(0)
        while not hasattr(caller, "work"):
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        await caller.close()
        assert await begun is None

    asyncio.run(play())
    assert ended == [True]
