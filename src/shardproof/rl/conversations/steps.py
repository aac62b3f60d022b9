"""The steps that every driver of conversations takes: begin, take the policy's turn, take the environment's answer.

`waves` takes them for engines that answer a whole batch, `rl.background` for engines that answer each request by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardproof.environments.protocol import Answer, Failure, Opening, Turn
from shardproof.errors import ShardproofError, fail
from shardproof.rl.conversations.conversation import Conversation, Rules
from shardproof.rl.data import Prompt, sample_seed
from shardproof.rl.templates import panics_as_errors
from shardproof.rollout.engine import Request
from shardproof.rollout.trajectory import Segment, Trajectory
from shardproof.user_code import describe_error


@dataclass(frozen=True)
class Start:
    """What a trajectory begins with: a prompt, its place in the batch, and its seeds."""

    prompt: Prompt
    group: int
    sample: int
    seed: int  # of the policy's draws
    environment_seed: int  # the same for all conversations of a group, so that they begin alike
    # What was drawn before the run was interrupted; of use without an environment only, whose state is lost.
    begun: Segment | None = None


def starts_of(seed: int, asked: Sequence[tuple[int, Prompt]], size: int, step: int) -> list[Start]:
    """The beginnings of `size` trajectories of each (group, prompt), in this order.

    Their seeds depend on seed, step, group and place in the group, and on nothing else.
    """
    return [
        Start(
            prompt,
            group,
            sample,
            sample_seed(seed, step, group * size + sample),
            # Held-out conversations, which have negative steps, begin alike in every evaluation.
            sample_seed(seed, max(step, -1), group),
        )
        for group, prompt in asked
        for sample in range(size)
    ]


def begin(start: Start, rules: Rules) -> Conversation:
    """A conversation that waits for its environment's opening."""
    prompt = start.prompt
    tokens = prompt.tokens if len(prompt.tokens) > 1 else rules.filler
    return Conversation(prompt, start.seed, Trajectory.of_prompt(tokens, start.group, start.sample), rules)


def next_request(conversation: Conversation) -> Request:
    """What the engine is asked for the policy's next turn."""
    may_go_on = conversation.number + 1 < conversation.rules.max_turns
    return Request(conversation.current, conversation.draw_seed, continues=may_go_on)


def take_turn(conversation: Conversation, trajectory: Trajectory, max_new_tokens: int) -> Turn | Failure:
    """Take a turn of the policy; returns what the environment reads, or why it cannot be read."""
    try:
        with panics_as_errors():
            return conversation.take(trajectory, max_new_tokens)
    except Exception as error:  # of a tokenizer or template, which are made of untrusted files
        return Failure(f"{conversation.place}: the policy's turn cannot be read: {describe_error(error)}")


def take_answer(
    conversation: Conversation, answer: Answer, seconds: float, max_new_tokens: int, version: int
) -> None:
    """Take the environment's answer, and its time so far; what cannot become tokens ends the conversation.

    `version` is that of the engine's weights.
    """
    conversation.seconds = seconds
    if isinstance(answer, Failure):
        conversation.fail(answer, version)
        return
    try:
        with panics_as_errors():
            if isinstance(answer, Opening):
                conversation.begin(answer, max_new_tokens)
            else:
                conversation.answer(answer, max_new_tokens)
    except (
        Exception
    ) as error:  # a template that rejects messages, or an environment's values that make no sense
        conversation.fail(Failure(f"{conversation.place}: {describe_error(error)}"), version)


def stopped_by(start: Start, conversation: Conversation) -> ShardproofError:
    """The error that a failed conversation ends the run with, where the recipe wants that."""
    name = f"the conversation about prompt {start.group}, sample {start.sample}"
    return fail("R509", "rollout", f"{name}: {conversation.error}.")


def with_text(trajectory: Trajectory, prompt: Prompt, tokenizer: Any) -> Trajectory:
    """A trajectory of one turn with the prompt's text, and what was said after it, without the token that ended it."""
    said = trajectory.tokens[len(prompt.tokens) :]
    with panics_as_errors():
        text = tokenizer.decode(said[:-1] if trajectory.finished else said, skip_special_tokens=True)
    facts = {**trajectory.facts, "prompt": prompt.text}
    if prompt.row.get("answer") is not None:
        facts["answer"] = prompt.row["answer"]
    return replace(trajectory, text=text, facts=facts)
