"""Distillation: the teacher's part of advantages, local and served teachers, runs, and what goes wrong."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

import shardproof as sp
from shardproof.config.load import from_json, load_recipe, to_json
from shardproof.config.roles import Teacher
from shardproof.errors import ConfigError, ShardproofError
from shardproof.rl.algorithms.registry import make_algorithm
from shardproof.rl.batches import make_batch
from shardproof.rl.checks import check_inputs
from shardproof.rl.models import check_contexts
from shardproof.rl.teacher import LocalTeacher, ServedTeacher, require_same_vocabulary
from shardproof.rollout.trajectory import Reward, Segment, Trajectory
from tests.ranks import run_ranks, run_ranks_outcomes
from tests.rl.judges import TEACHER, TeacherServer, plain_logprobs, serving
from tests.rl.runs import RECIPES, numbers, run_recipe, trajectory

RECIPE = RECIPES / "tiny-distillation.toml"
SMALL = (
    "train.steps=2",
    "train.prompts_per_step=4",
    "rollout.group_size=2",
    "output.eval_every=0",
    "output.trackers=[]",
    "optimizer.schedule=constant",
)


def recipe_of(folder: Path | str, *overrides: str) -> str:
    return to_json(load_recipe(RECIPE, [*SMALL, f"output.folder={folder}", *overrides]))


def conversations() -> list[Trajectory]:
    """Two groups; the second conversation has two turns with an environment's words between them."""

    def turn(*tokens: int) -> Segment:
        return Segment(tokens, "policy", tuple(-0.5 for _ in tokens), 0, trained=True)

    prompt, reply = Segment((1, 2, 3), "prompt"), Segment((9, 9), "environment")
    segments = [
        (prompt, turn(4, 5)),
        (prompt, turn(6), reply, turn(7, 8)),
        (prompt, turn(5)),
        (prompt, turn(6, 7, 8)),
    ]
    rewards = [Reward(1.0), Reward(0.0), Reward(2.0), Reward(0.0, failed=True)]
    return [
        Trajectory(parts, k // 2, k % 2, reward=reward, ended="done" if len(parts) > 2 else "")
        for k, (parts, reward) in enumerate(zip(segments, rewards, strict=True))
    ]


def test_the_teachers_part_is_its_log_ratio_discounted_over_turns() -> None:
    run_ranks(1, _check_advantages)


def _check_advantages() -> None:
    for gamma in (0.0, 0.5, 1.0):
        _check_advantages_of(gamma)


def _check_advantages_of(gamma: float) -> None:
    recipe = from_json(
        recipe_of("x", f"algorithm.teacher_gamma={gamma}", "algorithm.teacher_coef=0.3", "algorithm.turn_gamma=0.9",
                  "environment.name=tests.rl.user_rewards:any")
    )  # fmt: skip
    algorithm = make_algorithm(recipe.algorithm, recipe.rollout)
    assert {"old_logps", "teacher_logps"} <= algorithm.columns
    made = conversations()
    batch = make_batch(made)
    draw = torch.Generator().manual_seed(0)
    old, teacher = ([-torch.rand(length - 1, generator=draw) for length in batch.lengths] for _ in range(2))
    batch = batch.with_column("old_logps", old).with_column("teacher_logps", teacher)
    found = algorithm.advantages(batch, made).columns["advantages"]
    rewarded = [
        0.5 / 0.5001,
        -0.5 / 0.5001,
        0.0,
        0.0,
    ]  # (r - mean) / deviation in the group; alone, or failed: nothing
    for k, trajectory_ in enumerate(made):
        mask = [segment.trained for segment in trajectory_.segments for _ in segment.tokens][1:]
        turn = [n for n, segment in enumerate(trajectory_.segments) for _ in segment.tokens][1:]
        expected, following, later = torch.zeros(len(mask)), 0.0, None
        for place in reversed(range(len(mask))):
            if not mask[place] or k == 3:
                continue
            step = gamma * (0.9 if later is not None and turn[place] != later else 1.0)
            following = 0.3 * float(teacher[k][place] - old[k][place]) + step * following
            expected[place], later = following + rewarded[k], turn[place]
        torch.testing.assert_close(found[k], expected, rtol=0, atol=1e-6)


def sequences() -> list[list[int]]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(0, 12, (n,), generator=draw).tolist() for n in (5, 9, 3, 7)]


def _step(
    num_takers: int, temperature: float
) -> tuple[list[list[float]], float, dict[str, float], dict[str, Any]]:
    """(the teacher's log-probs, loss, metrics and gradients) of one update, with the loss of the run's algorithm."""
    rank = dist.get_rank()
    mine = sequences()[rank::num_takers] if rank < num_takers else []
    policy = sp.load(str(RECIPES / "tiny" / "model"), compute_dtype=torch.float32)
    teacher = LocalTeacher(sp.load(str(TEACHER), role="teacher", compute_dtype=torch.float32))
    said = teacher.logprobs(mine, temperature, 16)
    old = [row.cpu() for row in sp.logprobs(policy, mine, temperature)]
    recipe = from_json(recipe_of("x"))
    algorithm = make_algorithm(recipe.algorithm, recipe.rollout)
    advantages = [(there - here).tolist() for here, there in zip(old, said, strict=True)]
    columns = {"advantages": advantages, "old_logps": old, "teacher_logps": said, "rollout_logps": old}
    batch = sp.weigh(sp.Batch(mine, **columns), "token_mean")
    before = _weights(policy)
    optimizer = torch.optim.SGD(policy.trainable_parameters(), lr=1.0)
    result = sp.train_step(
        policy,
        batch,
        optimizer,
        loss=algorithm.loss,
        max_grad_norm=None,
        micro_batch_tokens=16,
        temperature=temperature,
    )
    after = _weights(policy)
    gradients = {name: (before[name] - after[name]).numpy() for name in before} if rank == 0 else {}
    return [row.tolist() for row in said], result.loss, dict(result.metrics), gradients


def _weights(model: sp.ShardedModel) -> dict[str, torch.Tensor]:
    with sp.WeightStream(model, dtype=torch.float32) as stream:
        return {name: tensor.double().cpu().clone() for name, tensor in stream}


@pytest.mark.distributed
@pytest.mark.parametrize(("ranks", "temperature"), [(2, 1.0), (3, 0.7)])
def test_loss_and_gradient_are_those_of_the_sampled_reverse_kl(ranks: int, temperature: float) -> None:
    """Against transformers and autograd; of three ranks the last has no sequences."""
    found = run_ranks(ranks, _step, 2, temperature)
    every = sequences()
    teacher = plain_logprobs(TEACHER, every, temperature)
    for rank in range(2):
        for row, expected in zip(found[rank][0], teacher[rank::2], strict=True):
            torch.testing.assert_close(torch.tensor(row), expected, rtol=0, atol=1e-5)
    model = AutoModelForCausalLM.from_pretrained(RECIPES / "tiny" / "model", dtype=torch.float32).eval()
    total, num, kl = torch.zeros(()), sum(len(tokens) - 1 for tokens in every), 0.0
    for tokens, there in zip(every, teacher, strict=True):
        ids = torch.tensor([tokens])
        logps = torch.log_softmax(model(input_ids=ids).logits[0, :-1] / temperature, dim=-1)
        here = logps.gather(1, ids[0, 1:, None]).squeeze(1)
        distance = (here - there).detach()
        total = total + (distance * here).sum() / num
        kl += float(distance.sum()) / num
    total.backward()
    _, loss, metrics, gradients = found[0]
    # At the old policy the ratio is 1: the loss is minus the mean advantage, which is the reverse KL's estimate.
    assert loss == pytest.approx(kl, abs=1e-5)
    assert metrics["teacher/kl"] == pytest.approx(kl, abs=1e-5)
    for name, param in model.named_parameters():
        if name in gradients and param.grad is not None:
            # Weights are float32: an update by a large gradient rounds by a share of it.
            largest = max(1.0, float(param.grad.abs().max()))
            error = float((torch.from_numpy(gradients[name]).float() - param.grad).abs().max())
            assert error < 2e-6 * largest, (name, error, largest)


@pytest.mark.distributed
def test_a_served_teacher_teaches_what_a_local_one_does_and_runs_resume(tmp_path: Path) -> None:
    local, served = tmp_path / "local", tmp_path / "served"
    run_ranks(
        3, run_recipe, recipe_of(local, "train.prompts_per_step=2", "output.save_every=1", "output.keep=4")
    )
    run_ranks(
        3,
        run_recipe,
        recipe_of(tmp_path / "cut", "train.prompts_per_step=2", "output.save_every=1", "train.steps=1"),
    )
    run_ranks(
        3,
        run_recipe,
        recipe_of(tmp_path / "cut", "train.prompts_per_step=2", "output.save_every=1", "output.keep=4"),
    )
    assert numbers(tmp_path / "cut") == numbers(local)
    assert not {"reward/mean", "reward/group_std", "eval/reward"} & set(trajectory(local)[-1]), (
        "nothing counts"
    )
    server = TeacherServer()
    server.failures = [503, 429]
    with serving(server) as url:
        run_ranks(
            3, run_recipe,
            recipe_of(served, "train.prompts_per_step=2", "teacher.path=none", f"teacher.url={url}", "teacher.retries=3"),
        )  # fmt: skip
    assert server.num_scored == 2 * 2 * 2 and not server.failures
    for one, other in zip(trajectory(local), trajectory(served), strict=True):
        for name in ("teacher/kl", "teacher/kl_k3", "teacher/logprob", "grad_norm", "loss/total"):
            assert one[name] == pytest.approx(other[name], abs=2e-4), name


@pytest.mark.distributed
def test_a_teacher_that_is_gone_or_another_ends_all_ranks(tmp_path: Path) -> None:
    gone = ("teacher.path=none", "teacher.url=http://127.0.0.1:9", "teacher.retries=0")
    outcomes = run_ranks_outcomes(2, run_recipe, recipe_of(tmp_path / "gone", *gone))
    assert all("R514" in outcome[2] and "127.0.0.1:9" in outcome[2] for outcome in outcomes)
    server = TeacherServer()
    with serving(server) as url:
        server.failures = [400]
        outcomes = run_ranks_outcomes(
            2, run_recipe, recipe_of(tmp_path / "refused", "teacher.path=none", f"teacher.url={url}")
        )
    assert all("R514" in outcome[2] and "answered 400" in outcome[2] for outcome in outcomes)


def test_another_vocabulary_is_refused_by_its_first_token() -> None:
    ours, theirs = (AutoTokenizer.from_pretrained(TEACHER) for _ in range(2))
    require_same_vocabulary(ours, theirs, "here")
    theirs.add_tokens(["<new>"])
    with pytest.raises(ShardproofError, match=r"R513.*'<new>' is not there for the policy"):
        require_same_vocabulary(ours, theirs, "there")


class Telling(TeacherServer):
    """A server that answers everything in one way."""

    def __init__(self, told: Any):
        super().__init__()
        self.told = told

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        return 200, self.told


@pytest.mark.parametrize(
    "told", [None, [], 5, {"data": None}, {"data": [1]}, {"data": {"id": "tiny-teacher"}}]
)
def test_a_server_that_lists_no_models_is_no_teacher(told: Any) -> None:
    with serving(Telling(told)) as url, pytest.raises(ShardproofError, match=r"R514.*it has none"):
        ServedTeacher(Teacher(url=url)).check(None)


@pytest.mark.parametrize("value", [0.5, 7.0, math.nan, -math.inf, math.inf])
def test_what_is_no_log_prob_is_not_learned_from(value: float) -> None:
    """A server can be set to return logits in their place."""
    rows = [None, {"2": {"logprob": -1.0}}, {"3": {"logprob": value}}]
    with serving(Telling({"choices": [{"prompt_logprobs": rows}]})) as url:
        teacher = ServedTeacher(Teacher(url=url))
        with pytest.raises(ShardproofError, match=f"R514.*returned the log-prob {value}"):
            teacher.of_tokens([1, 2, 3])


def test_a_server_is_checked_asked_again_and_not_asked_too_often() -> None:
    server = TeacherServer()
    pauses: list[float] = []
    tokenizer = AutoTokenizer.from_pretrained(TEACHER)
    with serving(server) as url:
        teacher = ServedTeacher(
            Teacher(url=url, key_variable="NO_SUCH_KEY", requests_per_s=1e6), pause=pauses.append
        )
        teacher.check(tokenizer)
        assert teacher.name == "tiny-teacher" and server.keys == {"Bearer "}
        server.shift = 1
        with pytest.raises(ShardproofError, match=r"R513.*splits"):
            teacher.check(tokenizer)
        with pytest.raises(ShardproofError, match=r"R514.*has no model 'other'"):
            ServedTeacher(Teacher(url=url, served_name="other")).check(tokenizer)
    busy = ServedTeacher(Teacher(url="http://127.0.0.1:9", retries=2), pause=pauses.append)
    with pytest.raises(ShardproofError, match="after 3 attempts"):
        busy.check(tokenizer)
    assert pauses == [0.5, 1.0]


def test_a_server_without_some_added_tokens_or_with_less_room_is_no_teacher() -> None:
    """Another version of a model may split plain text alike, and not know the tokens around thoughts."""
    server, tokenizer = TeacherServer(), AutoTokenizer.from_pretrained(TEACHER)
    with serving(server) as url:
        teacher = ServedTeacher(Teacher(url=f"{url}/v1/"))
        teacher.check(tokenizer, longest=63)
        with pytest.raises(ShardproofError, match=r"R514.*may have 64 tokens; .* takes up to 63"):
            teacher.check(tokenizer, longest=64)
        tokenizer.add_tokens(["<think>"], special_tokens=False)
        with pytest.raises(ShardproofError, match=r"R513.*<think>"):
            teacher.check(tokenizer)


def test_a_server_behind_a_gateway_is_asked_below_its_path() -> None:
    server = TeacherServer()
    plain, asked = server.answer, []

    def answer(path: str, body: Any) -> tuple[int, Any]:
        asked.append(path)
        return plain(path.removeprefix("/team/teacher"), body)

    server.answer = answer  # type: ignore[method-assign]
    with serving(server) as url:
        ServedTeacher(Teacher(url=f"{url}/team/teacher")).check(AutoTokenizer.from_pretrained(TEACHER))
    assert set(asked) == {"/team/teacher/v1/models", "/team/teacher/tokenize"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], r"C005 teacher: a sequence may have 1\d tokens, and .* has 8 positions"),
        (["algorithm.name=grpo", "algorithm.kl_coef=0.1"], "C005 reference: a sequence may have"),
        (["algorithm.name=ppo"], "C005 critic: a sequence may have"),
    ],
)
def test_models_beside_the_policy_have_room_for_its_sequences(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    short = tmp_path / "short"
    shutil.copytree(TEACHER, short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8}))
    role = message.split()[1].removesuffix(":")
    more = [] if role == "teacher" else ["teacher=none", "reward.functions=[{name='exact_match'}]"]
    more += ["rollout.max_new_tokens=9", f"{role}.path={short}", *overrides]
    recipe = from_json(recipe_of(tmp_path / "run", *more))
    with pytest.raises(ShardproofError, match=message):
        check_contexts(recipe, check_inputs(recipe))
    fits = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"max_new_tokens": 2})})
    check_contexts(fits, check_inputs(fits))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["teacher=none"], "teacher is missing"),
        (["algorithm.name=grpo"], "learns from no teacher"),
        (
            ["algorithm.name=grpo", "teacher=none", "algorithm.teacher_coef=0.5"],
            "teacher_coef is for distillation",
        ),
        (["teacher.url=http://here"], "has both"),
        (["teacher.path=none"], "has neither"),
        (["teacher.path=none", "teacher.url=here"], "must begin with"),
        (["teacher.retries=1"], "for a teacher with a url"),
        (
            ["teacher.path=none", "teacher.url=http://here", "rollout.temperature=0.7"],
            "scores at temperature 1",
        ),
        (["reward=none", "output.eval_every=1"], "nothing scores held-out"),
        (
            ["reward=none", "evaluation.sets=[{name='a', source='x.jsonl', every=2}]"],
            "nothing scores held-out",
        ),
        (["reward=none", "algorithm.dynamic_sampling=true"], "compares rewards"),
        (
            ["reward.functions=[{name='exact_match', weight=1.0}]", "rollout.group_size=1"],
            "compare completions of one prompt",
        ),
        (
            ["rollout.group_size=1", "algorithm.kl_coef=0.1", "algorithm.kl_in=reward"],
            "kl_in='reward' with rollout.group_size=1",
        ),
        (["rollout.group_size=1", "algorithm.overlong_from=2"], "overlong_from=2 with rollout.group_size=1"),
    ],
)
def test_recipes_that_cannot_work_are_refused(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe_of(tmp_path, *overrides)
