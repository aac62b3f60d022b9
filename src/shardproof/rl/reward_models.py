"""Reward models in a run: what each says of this rank's completions, as one more part of their rewards.

Scoring is collective: all ranks score when the completions of a step are there, also ranks that have none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from shardproof.bounds import MAX_REWARD, within
from shardproof.config.roles import RewardModel
from shardproof.config.schema import Recipe, Role
from shardproof.dist.collectives import exchange_among, together
from shardproof.errors import ShardproofError, fail
from shardproof.model.families import max_positions
from shardproof.rl.checks import load_tokenizer, model_folder
from shardproof.rl.conversations.steps import ASKED
from shardproof.rl.rewards.failures import first_of_each_kind, notice
from shardproof.rl.rewards.parts import with_part
from shardproof.rl.rewards.specs import RewardSpec
from shardproof.rl.templates import call_each, panics_as_errors, render_chat
from shardproof.rollout.trajectory import Reward, Trajectory
from shardproof.shard.sharded_model import ShardedModel
from shardproof.train.score import scores
from shardproof.user_code import describe_error

_RENDER_S = 10.0  # for one template

Texts = list[list[int] | str]  # a text's tokens, or why it has none


@dataclass(frozen=True)
class LoadedRewardModel:
    """One reward model, with the tokenizer that its texts are written for."""

    settings: RewardModel
    model: ShardedModel
    tokenizer: Any

    @property
    def max_tokens(self) -> int | None:
        """The most tokens of a text; one more follows it when it is scored."""
        limits = [max_positions(self.model.model.config), self.settings.max_tokens]
        known = [limit - (not k) for k, limit in enumerate(limits) if limit is not None]
        return min(known, default=None)

    def texts(self, trajectories: Sequence[Trajectory]) -> Texts:
        """Each conversation as this model reads it."""
        return [self._text(trajectory) for trajectory in trajectories]

    def _text(self, trajectory: Trajectory) -> list[int] | str:
        try:
            with panics_as_errors():
                tokens = call_each([partial(self._tokens, trajectory)], _RENDER_S)[0]
        except ShardproofError:
            raise
        except Exception as error:  # of a tokenizer or template, which are made of untrusted files
            return f"the text cannot be written: {describe_error(error)}"
        if not tokens:
            return "the text has no tokens"
        limit = self.max_tokens
        if limit is not None and len(tokens) > limit:
            return f"the text has {len(tokens)} tokens, more than {limit}"
        return tokens

    def _tokens(self, trajectory: Trajectory) -> list[int]:
        if self.settings.format == "text":
            tokens = list(self.tokenizer(trajectory.facts["prompt"] + trajectory.text)["input_ids"])
            begin = getattr(self.tokenizer, "bos_token_id", None)
            if begin is not None and tokens[:2] == [
                begin,
                begin,
            ]:  # the policy's template has written it already
                del tokens[0]
            end = self.tokenizer.eos_token_id  # as texts end that reward models are trained on
            return tokens if end is None or tokens[-1:] == [end] else [*tokens, end]
        if ASKED not in trajectory.facts:
            raise ValueError("its row has no prompt in the column data.prompt_column")
        asked = trajectory.facts[ASKED]
        messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked)
        if messages and messages[-1].get("role") == "assistant":  # a turn that was begun for the policy
            begun = messages.pop()
            said = f"{begun.get('content', '')}{trajectory.text}"
        else:
            said = trajectory.text
        whole = [*messages, {"role": "assistant", "content": said}]
        written = render_chat(self.tokenizer, whole, prompt=False)
        return list(self.tokenizer(written, add_special_tokens=False)["input_ids"])


class RewardModels:
    """The reward models of a run. `stops`: a text that cannot be scored ends the run."""

    def __init__(self, loaded: Sequence[LoadedRewardModel], micro_batch_tokens: int, stops: bool = False):
        self.loaded, self._micro_batch_tokens, self._stops = list(loaded), micro_batch_tokens, stops

    @property
    def specs(self) -> list[RewardSpec]:
        return [RewardSpec(each.settings.name, each.settings.weight) for each in self.loaded]

    def added(
        self, trajectories: Sequence[Trajectory], rewards: Sequence[Reward], noticed: set[str]
    ) -> list[Reward]:
        """The rewards with each model's score as one more part. A conversation whose environment failed has none.

        A text that a model cannot read fails as a function's reward does, and rank 0 shows kinds of failures that are not
        among those `noticed` yet; if one rank raises, all do.

        Collective: every rank.
        """
        found = list(rewards)
        for one in self.loaded:
            scored = [k for k, made in enumerate(trajectories) if made.ended != "failed"]
            with together("reward") as told:
                texts = one.texts([trajectories[k] for k in scored])
                reasons = [each for each in texts if isinstance(each, str)]
                failed = (_with_score(Reward(0.0), one.settings, reason) for reason in reasons)
                told.mine = [len(texts), len(reasons), first_of_each_kind(failed)]
                self._check(one, reasons)
            num, num_failed = (sum(row[k] for row in told.rows) for k in (0, 1))
            kinds = notice([kinds_there for _, _, kinds_there in told.rows], noticed)
            if one.settings.weight and num and num == num_failed:  # one without is only measured
                (rank, _, reason), *_ = kinds.values()
                message = f"reward model {one.settings.name!r} can read no text of the batch: rank {rank}: {reason}."
                raise fail("R504", "reward", message, fix="see docs/reward-models.md#what-it-reads")
            # Of ranks that share sequences, the first one may be the only one that was given the conversations.
            (written, *_) = exchange_among(
                [each for each in texts if not isinstance(each, str)], one.model.sequence_parallel
            )
            values = iter(scores(one.model, written, self._micro_batch_tokens).tolist())
            for k, text in zip(scored, texts, strict=True):
                found[k] = _with_score(
                    found[k], one.settings, text if isinstance(text, str) else next(values)
                )
        return found

    def _check(self, one: LoadedRewardModel, reasons: Sequence[str]) -> None:
        if reasons and self._stops:
            raise fail("R504", "reward", f"reward model {one.settings.name!r} failed: {reasons[0]}.")


def _with_score(reward: Reward, settings: RewardModel, score: float | str) -> Reward:
    """The reward with a score as one more part, or with the reason why there is none."""
    if not isinstance(score, str) and not within(abs(score), MAX_REWARD):
        score = f"the score {score:g} is larger than {MAX_REWARD:g}"
    if isinstance(score, str):
        return with_part(reward, settings.name, settings.weight, None, score)
    return with_part(reward, settings.name, settings.weight, score)


def load_reward_models(recipe: Recipe, load: Callable[..., ShardedModel]) -> RewardModels | None:
    """The recipe's reward models, each attested and with a line in the ledger; None if there are none.

    `load` is `rl.models.load_role` of the run. Collective: every rank.
    """
    settings = recipe.reward
    if settings is None or not settings.models:
        return None
    loaded = []
    for each in settings.models:
        with together("reward"):
            tokenizer = read_tokenizer(each)
        section = Role(path=each.path, strategy=each.strategy, cpu_offload=each.cpu_offload)
        model = load(section, "reward", trained=False, trust_remote_code=each.trust_remote_code)
        loaded.append(LoadedRewardModel(each, model, tokenizer))
    return RewardModels(loaded, recipe.train.micro_batch_tokens, settings.on_error == "stop")


def read_tokenizer(settings: RewardModel) -> Any:
    """The tokenizer of a reward model; raises if it cannot write what the recipe wants it to read."""
    folder = model_folder(settings.path)
    tokenizer = load_tokenizer(folder, settings.trust_remote_code)
    if settings.format == "chat" and not getattr(tokenizer, "chat_template", None):
        message = f"the tokenizer of the reward model {settings.path!r} has no chat template."
        raise fail("C005", "reward", message, fix='set format = "text", or give it a chat_template.jinja')
    return tokenizer
