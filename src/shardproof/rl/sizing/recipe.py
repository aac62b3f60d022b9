"""Bytes of a whole run on its fullest rank, phase by phase: policy, reference, critic, engine, activations, export."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from shardproof.config.roles import RewardModel, Teacher
from shardproof.config.schema import Critic, Lora, Recipe, Role
from shardproof.model.families import max_positions
from shardproof.model.roles import CRITIC, POLICY, REFERENCE, REWARD, TEACHER
from shardproof.rl.algorithms.registry import make_algorithm
from shardproof.rl.checks import make_lora, model_folder
from shardproof.rl.scorers import keeps_reference
from shardproof.rl.sizing.engine import EngineBytes, engine_bytes, most_rows, replica_bytes
from shardproof.rl.sizing.model import Estimate, Shape, Sharding, estimate, held_bytes, shape_of
from shardproof.shard.footprint import MARGIN
from shardproof.user_code import is_user_name
from shardproof.weights.source import read_config

PROCESS_BYTES = 150 * 2**20  # of a rank that has imported torch and holds nothing
Parts = dict[str, int]


@dataclass(frozen=True)
class Machine:
    """Where a run is to take place."""

    ranks: int  # processes of one node
    nodes: int = 1
    gpu_bytes: int | None = None  # of one GPU; None: ranks compute on the CPU
    host_bytes: int | None = None  # of one node; None: not known

    @property
    def num_ranks(self) -> int:
        return self.ranks * self.nodes

    @property
    def on_gpu(self) -> bool:
        return self.gpu_bytes is not None


@dataclass(frozen=True)
class Phase:
    """What the fullest rank holds in one phase of a run, part by part."""

    name: str
    device: Parts  # where the rank computes: its GPU, or the host if there is none
    host: Parts  # in host memory, beside a GPU

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())


@dataclass(frozen=True)
class RunEstimate:
    """The phases of a run on a machine."""

    machine: Machine
    phases: tuple[Phase, ...]
    shared: Parts  # in host memory, once per node
    notes: tuple[str, ...] = ()

    @property
    def fullest(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.device_bytes)

    @property
    def device_bytes(self) -> int:
        """The most that a rank holds at a time on its GPU, or in the host if there is none."""
        return self.fullest.device_bytes

    @property
    def host_bytes(self) -> int:
        """The most that all ranks of one node hold at a time in host memory."""
        each = [
            phase.host_bytes + (0 if self.machine.on_gpu else phase.device_bytes) for phase in self.phases
        ]
        return self.machine.ranks * (max(each) + PROCESS_BYTES) + sum(self.shared.values())

    @property
    def usable_gpu_bytes(self) -> int | None:
        """What of a GPU is there for tensors: the rest is for its context, fragmentation and what is not counted."""
        return None if self.machine.gpu_bytes is None else int(self.machine.gpu_bytes * (1 - MARGIN))

    @property
    def fits_gpu(self) -> bool:
        limit = self.usable_gpu_bytes
        return limit is None or self.device_bytes <= limit

    @property
    def fits_host(self) -> bool:
        return self.machine.host_bytes is None or self.host_bytes <= self.machine.host_bytes

    @property
    def fits(self) -> bool:
        return self.fits_gpu and self.fits_host


def estimate_run(recipe: Recipe, machine: Machine, prompt_lengths: Sequence[int]) -> RunEstimate:
    """What a run of the recipe holds on that machine. Reads configs only. Memory: buffers of the models."""
    return _Counter(recipe, machine, prompt_lengths).count()


def held_in_host(recipe: Recipe, num_ranks: int, on_gpu: bool) -> int:
    """Bytes that all ranks together hold in host memory between passes: weights, gradients, optimizer state, replicas."""
    total, shapes = 0, _roles(recipe)
    for role, shape in shapes.items():
        if not on_gpu or _is_offloaded(recipe, role):
            held = held_bytes(shape, _sharding(recipe, role, on_gpu), num_ranks)
            total += held.parameters + held.gradients + held.optimizer
    if not on_gpu and recipe.rollout.engine == "embedded" and _samples(recipe):
        total += replica_bytes(shapes[POLICY], getattr(torch, recipe.model.compute_dtype))
    return total * num_ranks


def saved_bytes(recipe: Recipe) -> int:
    """Bytes of one checkpoint: weights and optimizer state. Of an optimizer of the user's nothing is counted."""
    total, moves = 0, recipe.algorithm.reference_sync_every > 0
    for role, shape in _roles(recipe).items():
        if not shape.trained or role == TEACHER or (role == REFERENCE and not moves):
            continue
        held = held_bytes(shape, _sharding(recipe, role, False), 1)
        total += held.parameters - shape.buffer_bytes
        total += 0 if is_user_name(recipe.optimizer.name) else held.optimizer
    return total


class _Counter:
    """Adds up the parts of a run's phases."""

    def __init__(self, recipe: Recipe, machine: Machine, prompt_lengths: Sequence[int]):
        self.recipe, self.machine = recipe, machine
        prompt_lengths = conversation_lengths(recipe, prompt_lengths)
        self.shapes = _roles(recipe)
        self.tokens, self.is_accumulated = _micro_batch(recipe, machine.num_ranks, max(prompt_lengths))
        self.models: dict[str, Estimate] = {
            role: estimate(shape, _sharding(recipe, role, machine.on_gpu), machine.num_ranks, self.tokens)
            for role, shape in self.shapes.items()
        }
        self.engine = EngineBytes()
        if _samples(recipe) and recipe.rollout.engine in ("embedded", "sharded"):
            free = None
            if machine.gpu_bytes:
                free = machine.gpu_bytes - sum(
                    each.parameters + each.optimizer for each in self.models.values()
                )
            self.engine = engine_bytes(
                recipe, self.shapes[POLICY], machine.num_ranks, prompt_lengths, machine.on_gpu, free
            )

    def count(self) -> RunEstimate:
        phases = [self._load()]
        if _samples(self.recipe):
            phases += [self._generate(), *self._score()]
        phases += [self._update(role) for role in (POLICY, CRITIC) if role in self.models]
        if _samples(self.recipe):
            phases.append(self._phase("sync", self._resting(awake=True) | self._export()))
        phases.append(self._phase("save", self._resting(awake=True) | self._export()))
        return RunEstimate(self.machine, tuple(phases), self._shared(), tuple(self._notes()))

    def _load(self) -> Phase:
        writing = max(model.load_peak - model.parameters for model in self.models.values())
        parts = {f"{role} weights": model.parameters for role, model in self.models.items()}
        parts |= {"loading": writing, "engine weights": self.engine.replica} | self._vllm()
        return self._phase("load", parts)

    def _generate(self) -> Phase:
        engine, parts = self.engine, self._resting(awake=True)
        parts["KV cache"] = engine.cache
        parts["decoding"] = engine.decoding
        if self.recipe.rollout.engine == "sharded":
            parts["gathered, logits"] = self._gathered_for_decoding()
        return self._phase("generate", parts, lends=self.recipe.rollout.offload_policy)

    def _gathered_for_decoding(self) -> int:
        layout = _sharding(self.recipe, POLICY, self.machine.on_gpu)
        rows = most_rows(self.recipe, self.machine.num_ranks)
        return estimate(self.shapes[POLICY], layout, self.machine.num_ranks, rows).scoring

    def _score(self) -> list[Phase]:
        """Log-probs and values that the algorithm needs before it updates; the engine is still awake."""
        columns = make_algorithm(self.recipe.algorithm, self.recipe.rollout).columns
        scorers = {"ref_logps": REFERENCE, "values": CRITIC, "teacher_logps": TEACHER}
        if self.recipe.teacher is not None and self.recipe.teacher.url is not None:
            columns = columns - {"teacher_logps"}  # which a server computes
        roles = [scorers.get(column, POLICY) for column in columns]
        # With LoRA the policy without its adapters is the reference.
        models = [self.models.get(role, self.models[POLICY]) for role in roles]
        models += [self.models[judge_role(each)] for each in _reward_models(self.recipe)]
        if not models:
            return []
        working = max(model.scoring for model in models)
        return [self._phase("score", self._resting(awake=True) | {"gathered, logits": working})]

    def _update(self, role: str) -> Phase:
        model = self.models[role]
        parts = self._resting(awake=not self._sleeps())
        gradients = model.gradients
        if not self.is_accumulated and not _is_offloaded(self.recipe, role):
            # Gradients of one micro-batch take the place of its activations.
            gradients = max(gradients - model.activations - model.gathered, 0)
        parts |= {f"{role} gradients": gradients, "activations": model.activations}
        parts["gathered, logits"] = model.gathered
        return self._phase(f"update {role}", parts)

    def _sleeps(self) -> bool:
        """Whether the engine sleeps during updates; what the driver of the GPU can do is not known here."""
        rollout = self.recipe.rollout
        if rollout.sleep is not None:
            return rollout.sleep
        return self.machine.on_gpu and rollout.engine == "embedded" and rollout.fp8 == "off"

    def _resting(self, awake: bool) -> Parts:
        """What is held whatever the phase: weights, optimizer states, and the engine unless it sleeps."""
        parts: Parts = {}
        for role, model in self.models.items():
            parts |= {f"{role} weights": model.parameters, f"{role} optimizer": model.optimizer}
        if awake:
            parts["engine weights"] = self.engine.replica
            parts |= self._vllm()
        if awake and self.engine.cache_stays:
            parts["KV cache"] = self.engine.cache
        return parts

    def _export(self) -> Parts:
        return {"export": self.models[POLICY].export}

    def _vllm(self) -> Parts:
        """The part of the first rank's GPU that servers have: without `devices`, one of them is taken to be on it."""
        settings = self.recipe.rollout.vllm
        if not self._starts_vllm() or not self.machine.gpu_bytes:
            return {}
        num = sum("0" in entry.split(",") for entry in settings.devices) if settings.devices else 1
        return {"vLLM": int(num * settings.gpu_memory_utilization * self.machine.gpu_bytes)}

    def _starts_vllm(self) -> bool:
        rollout = self.recipe.rollout
        return rollout.engine == "vllm" and not rollout.vllm.urls and _samples(self.recipe)

    def _shared(self) -> Parts:
        """Host memory that a node holds once: the weights on their way to vLLM, twice, and servers without a GPU."""
        if self.recipe.rollout.engine != "vllm" or not _samples(self.recipe):
            return {}
        weights = replica_bytes(self.shapes[POLICY], getattr(torch, self.recipe.model.compute_dtype))
        parts = {"weights for vLLM": 2 * weights}
        if self._starts_vllm() and not self.machine.on_gpu:
            vllm = self.recipe.rollout.vllm
            parts["vLLM"] = vllm.replicas * (weights + vllm.kv_cache_gib * 2**30)
        return parts

    def _phase(self, name: str, parts: Parts, lends: bool = False) -> Phase:
        """The phase with each part where it lies: offloaded roles in host memory, the rest where the rank computes."""
        if not self.machine.on_gpu:
            return Phase(name, {part: size for part, size in parts.items() if size}, {})
        away = {role for role in self.models if _is_offloaded(self.recipe, role)} | (
            {POLICY} if lends else set()
        )
        host = {part for part in parts if part.partition(" ")[0] in away}
        return Phase(
            name,
            {part: size for part, size in parts.items() if size and part not in host},
            {part: size for part, size in parts.items() if size and part in host},
        )

    def _notes(self) -> list[str]:
        recipe, found = self.recipe, []
        if not all(model.counted for model in self.models.values()):
            found.append("activations are estimated from sizes: this model cannot run on the meta device")
        if recipe.model.checkpoint_activations == "auto":
            found.append(
                'checkpoint_activations="auto" is counted as if every block were recomputed; it uses memory that is free'
            )
        if recipe.environment is not None:
            longest = "environment.max_tokens"
            if recipe.environment.max_tokens is None:
                longest = "the prompt and max_turns turns, without replies: set environment.max_tokens to count them"
            found.append(f"the longest conversation is counted as {longest}")
        if recipe.rollout.engine not in ("embedded", "sharded", "vllm") and _samples(recipe):
            found.append(f"the memory of your own engine {recipe.rollout.engine!r} is not counted")
        return found


def conversation_lengths(recipe: Recipe, prompt_lengths: Sequence[int]) -> list[int]:
    """How many tokens the policy may have to read before a turn: the prompts, and with an environment what follows them.

    A conversation has `environment.max_tokens` tokens; without that limit, its prompt and `max_turns` turns of the
    policy, since the length of replies is not known. The model's context is the limit of both.
    """
    if recipe.environment is None:
        return list(prompt_lengths)
    turn, longest = recipe.rollout.max_new_tokens, max(prompt_lengths)
    conversation = recipe.environment.max_tokens or longest + recipe.environment.max_turns * turn
    config = read_config(model_folder(recipe.model.path), recipe.model.trust_remote_code)
    conversation = min(conversation, max_positions(config) or conversation)
    return sorted({*prompt_lengths, max(longest, conversation - turn)})


def _micro_batch(recipe: Recipe, num_ranks: int, longest_prompt: int) -> tuple[int, bool]:
    """(tokens of a rank's largest micro-batch, whether a step may have several)."""
    asked = recipe.train.micro_batch_tokens
    if not _samples(recipe):
        return asked, True
    sequence = longest_prompt + recipe.rollout.max_new_tokens
    takers = max(num_ranks // recipe.model.sequence_parallel, 1)
    num_sequences = -(-recipe.train.prompts_per_step // takers) * recipe.rollout.group_size
    in_an_update = -(-num_sequences // recipe.algorithm.updates_per_epoch) * sequence
    return max(sequence, min(asked, in_an_update)), in_an_update > asked


def _samples(recipe: Recipe) -> bool:
    return make_algorithm(recipe.algorithm, recipe.rollout).spec.samples


def _section(recipe: Recipe, role: str) -> Role | Teacher | RewardModel | None:
    """What the recipe says about a model beside the policy."""
    judges = {judge_role(each): each for each in _reward_models(recipe)}
    found = {REFERENCE: recipe.reference, CRITIC: recipe.critic, TEACHER: recipe.teacher} | judges
    return found.get(role)


def _reward_models(recipe: Recipe) -> Sequence[RewardModel]:
    return recipe.reward.models if recipe.reward is not None else ()


def judge_role(settings: RewardModel) -> str:
    """What the parts of a reward model are called."""
    return f"{REWARD}/{settings.name}"


def _is_offloaded(recipe: Recipe, role: str) -> bool:
    section = _section(recipe, role)
    own = section.cpu_offload if section is not None else None
    return recipe.model.cpu_offload if own is None else own


def _roles(recipe: Recipe) -> Mapping[str, Shape]:
    """The models that a run loads, as `rl.setup` does."""
    algorithm = make_algorithm(recipe.algorithm, recipe.rollout)
    model = recipe.model
    lora = None if model.lora is None else model.lora.model_dump_json()
    common = (model.param_dtype, model.compute_dtype, model.trust_remote_code)
    found = {POLICY: _shape(model.path, algorithm.spec.role, lora, *common)}
    if keeps_reference(recipe, algorithm):
        path = (recipe.reference or Role()).path or model.path
        found[REFERENCE] = _shape(path, REFERENCE, None, *common)
    if algorithm.spec.has_critic:
        critic = recipe.critic or Critic()
        adapters = None if critic.lora is None else critic.lora.model_dump_json()
        found[CRITIC] = _shape(critic.path or model.path, CRITIC, adapters, *common)
    if recipe.teacher is not None and recipe.teacher.path is not None:
        own = (*common[:2], recipe.teacher.trust_remote_code)
        found[TEACHER] = _shape(recipe.teacher.path, TEACHER, None, *own)
    for each in _reward_models(recipe):
        shape = _shape(each.path, REWARD, None, *common[:2], each.trust_remote_code)
        found[judge_role(each)] = replace(shape, trained=False)
    return found


@lru_cache(maxsize=16)
def _shape(
    path: str, role: str, lora: str | None, param_dtype: str, compute_dtype: str, trust_remote_code: bool
) -> Shape:
    config = read_config(model_folder(path), trust_remote_code)
    adapters, base = None, None
    if lora is not None:
        section = Lora.model_validate_json(lora)
        adapters, base = make_lora(section), section.base
    held, computed = getattr(torch, param_dtype), getattr(torch, compute_dtype)
    return shape_of(config, role, held, adapters, trust_remote_code, base, computed)


def _sharding(recipe: Recipe, role: str, on_gpu: bool) -> Sharding:
    model = recipe.model
    section = _section(recipe, role)
    arguments = recipe.optimizer.arguments
    return Sharding(
        strategy=(section.strategy if section is not None else None) or model.strategy,
        compute_dtype=getattr(torch, model.compute_dtype),
        param_dtype=getattr(torch, model.param_dtype),
        sequence_parallel=model.sequence_parallel,
        replicate=model.replicate,
        checkpoint_activations=model.checkpoint_activations if role in (POLICY, CRITIC) else False,
        reshard_after_forward=model.reshard_after_forward,
        optimizer=recipe.optimizer.name,
        optimizer_options={key: value for key, value in arguments.items() if key != "name"},
        on_gpu=on_gpu,
    )
