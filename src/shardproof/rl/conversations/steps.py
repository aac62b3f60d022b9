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
from shardproof.rollout.engine import Request, Sampling
from shardproof.rollout.sampling import overridden
from shardproof.rollout.stop_strings import without_stop
from shardproof.rollout.trajectory import Segment, Trajectory
from shardproof.user_code import describe_error

ASKED = "asked"  # a trajectory's fact: the prompt as its row has it, text or messages


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
    greedy: bool = False  # the most likely tokens are taken

    def own_sampling(self, sampling: Sampling) -> Sampling | None:
        """How its tokens are drawn in a batch of this sampling, where that is another way."""
        own = overridden(sampling, self.prompt.sampling)
        own = replace(own, temperature=0.0) if self.greedy else own
        return None if own is sampling else own

    def max_new_tokens(self, sampling: Sampling) -> int:
        """The most tokens that the policy says at a time."""
        return (self.own_sampling(sampling) or sampling).max_new_tokens


def starts_of(
    seed: int, asked: Sequence[tuple[int, Prompt]], size: int, step: int, greedy: bool = False
) -> list[Start]:
    """The beginnings of `size` trajectories of each (group, prompt), in this order, each with a greedy one if asked.

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
            greedy=sample == size,
        )
        for group, prompt in asked
        for sample in range(size + greedy)
    ]


def begin(start: Start, rules: Rules) -> Conversation:
    """A conversation that waits for its environment's opening."""
    prompt = start.prompt
    tokens = prompt.tokens if len(prompt.tokens) > 1 else rules.filler
    return Conversation(prompt, start.seed, Trajectory.of_prompt(tokens, start.group, start.sample), rules)


def next_request(conversation: Conversation, own: Sampling | None = None) -> Request:
    """What the engine is asked for the policy's next turn; `own` is the conversation's own way to draw it."""
    may_go_on = conversation.number + 1 < conversation.rules.max_turns
    return Request(conversation.current, conversation.draw_seed, continues=may_go_on, sampling=own)


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


def with_text(
    trajectory: Trajectory,
    prompt: Prompt,
    tokenizer: Any,
    asks: str | None = None,
    include_stop: bool = True,
) -> Trajectory:
    """A trajectory of one turn with the prompt's text, and what was said after it, without the token that ended it.

    `asks` is the row's column whose text or messages are kept, for reward models that write them in their own way. Without
    `include_stop` a stop string that ended it is left out, too.
    """
    said = trajectory.tokens[len(prompt.asked) :]
    with panics_as_errors():
        if trajectory.stop_string and not include_stop:
            text = without_stop(said, trajectory.stop_string, tokenizer)
        else:
            text = tokenizer.decode(said[: len(said) - trajectory.has_stop_token], skip_special_tokens=True)
    facts = {**trajectory.facts, "prompt": prompt.text, **prompt.facts}
    if asks is not None and asks in prompt.row:
        facts[ASKED] = prompt.row[asks]
    return replace(trajectory, text=text, facts=facts)
