"""The estimate of a recipe against real runs on two ranks, whose live tensors are counted at every operation."""

import gc
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from shardproof.config.load import from_json
from shardproof.doctor.forecast import prompt_lengths
from shardproof.export import gather
from shardproof.rl import loop
from shardproof.rl.rollouts import Sampler
from shardproof.rl.scorers import Scorers
from shardproof.rl.sizing.live import LiveBytes
from shardproof.rl.sizing.recipe import Machine, conversation_lengths, estimate_run
from shardproof.shard.offload import optimizer_tensors
from shardproof.shard.torch_private import local_tensor
from shardproof.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.rl.runs import TINY, small_recipe

DENSE = {
    "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = DENSE | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def model_folder(folder: Path, model_type: str, sizes: dict) -> Path:
    """A config of these sizes beside the tiny model's tokenizer."""
    from transformers import AutoConfig

    source = TINY.parent / "tiny" / "model"
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    ours = json.loads((source / "config.json").read_text())
    ids = {
        key: ours[key]
        for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
        if key in ours
    }
    AutoConfig.for_model(model_type, **(ids | sizes)).save_pretrained(folder)
    return folder


def tensor_bytes(tensors) -> int:
    """Each storage once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in map(local_tensor, tensors)}
    return sum(storage.nbytes() for storage in storages.values())


def held_by(run) -> dict[str, int]:
    """What this rank's models, optimizers and replica hold, tensor by tensor."""
    found = {}
    models = {"policy": run.policy.model, "reference": run.scorers.reference, "critic": run.scorers.critic}
    for role, model in models.items():
        if model is not None:
            buffers = sum(buffer.nbytes for buffer in model.module.buffers())
            found[f"{role} weights"] = sum(local_tensor(p).nbytes for p in model.parameters()) + buffers
    for role, trainer in (("policy", run.policy), ("critic", run.critic)):
        if trainer is not None:
            moments = [t for t in optimizer_tensors(trainer.optimizer) if t.dim()]
            found[f"{role} optimizer"] = sum(local_tensor(t).nbytes for t in moments)
    replica = getattr(run.sampler.engine, "model", None)
    if replica is not None:
        found["engine weights"] = tensor_bytes([*replica.parameters(), *replica.buffers()])
    return found


def measure(recipe_json: str) -> tuple[dict[str, int], dict[str, int]]:
    """({part: bytes}, {phase: most bytes that were alive in it}) of a run on this rank."""
    peaks: dict[str, int] = {}
    runs = []
    gc.collect()
    gc.freeze()  # garbage is collected at every peak, and must not be looked for in what is here already
    with pytest.MonkeyPatch.context() as patch, LiveBytes("cpu", collects=True) as live:

        def watch(name):
            def wrapped(function):
                def call(*args, **kwargs):
                    gc.collect()
                    live.restart()
                    try:
                        return function(*args, **kwargs)
                    finally:
                        phase = name if isinstance(name, str) else name(args[0])
                        peaks[phase] = max(live.peak, peaks.get(phase, 0))

                return call

            return wrapped

        def set_up(*args):
            run = watch("load")(real_set_up)(*args)
            # No completion ends before its last token: the estimate is of the longest ones.
            sampling = replace(run.sampling, stop_ids=())
            run.buffer.means = replace(run.buffer.means, sampling=sampling)
            runs.append(replace(run, sampling=sampling))
            return runs[-1]

        real_set_up = loop.set_up
        patch.setattr(loop, "set_up", set_up)
        patch.setattr(loop, "hand_over", watch("sync")(loop.hand_over))
        patch.setattr(Sampler, "sample", watch("generate")(Sampler.sample))
        patch.setattr(Scorers, "scored", watch("score")(Scorers.scored))
        patch.setattr(Trainer, "step", watch(lambda trainer: f"update {trainer.model.role}")(Trainer.step))
        patch.setattr(gather, "open_region", lambda size, group: None)  # estimated is what is sent
        loop.train(from_json(recipe_json))
    return held_by(runs[0]), peaks


COMMON = (
    "model.random_init=true",
    "model.compute_dtype=float32",
    "train.prompts_per_step=8",
    "train.micro_batch_tokens=256",
    "rollout.group_size=4",
    "rollout.batch_size=8",
    "rollout.max_new_tokens=24",
    "output.eval_every=0",
    "output.save_model=false",
)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "sizes", "overrides"),
    [
        ("llama", DENSE, ("algorithm.kl_coef=0.1",)),
        ("llama", DENSE, ("model.lora.r=8", "algorithm.kl_coef=0.1", "model.checkpoint_activations=true")),
        ("qwen3_moe", EXPERTS, ("optimizer.name=muon", "rollout.engine=sharded")),
        ("qwen3", DENSE, ("algorithm.name=ppo", "algorithm.kl_coef=0.1", "algorithm.updates_per_batch=2")),
    ],
    ids=["reference", "LoRA", "experts, Muon, sharded engine", "PPO with critic"],
)
def test_a_run_holds_what_is_estimated(tmp_path, model_type, sizes, overrides):
    folder = model_folder(tmp_path / "model", model_type, sizes)
    text = small_recipe(tmp_path / "run", *COMMON, f"model.path={folder}", *overrides)
    recipe = from_json(text)
    expected = estimate_run(recipe, Machine(ranks=2), prompt_lengths(recipe)[0])
    replies = run_ranks(2, measure, text)
    held, peaks = ({key: max(reply[i][key] for reply in replies) for key in replies[0][i]} for i in (0, 1))
    estimated = {part: size for phase in expected.phases for part, size in phase.device.items()}
    assert held == {part: estimated[part] for part in held}
    names = {phase.name for phase in expected.phases}
    assert names - {"save"} <= set(peaks) <= names | {"score"}  # which may be asked for nothing
    for phase in expected.phases:
        if phase.name in peaks:
            # Micro-batches are never quite full, so that more is estimated than is there, seldom less.
            ratio = phase.device_bytes / peaks[phase.name]
            assert 0.9 <= ratio <= 1.25, (phase, peaks[phase.name])


def test_conversations_are_as_long_as_their_limit_says(tmp_path):
    """Without a limit, a prompt and all turns; the model's context bounds both. Prompts alone need no environment."""
    own = "environment.name=my_module:Game"
    for settings, longest in (
        ([], 7),
        ([own, "environment.max_turns=3"], 7 + 2 * 4),
        ([own, "environment.max_tokens=40"], 40 - 4),
        ([own, "environment.max_tokens=100000"], 64 - 4),
    ):
        recipe = from_json(small_recipe(tmp_path, *settings))
        assert max(conversation_lengths(recipe, [5, 7])) == longest


def test_a_paged_cache_is_counted_as_it_is_made(tmp_path):
    """As the setting says; else what all rows at a time need, at most half of the memory that is free."""

    def cache(gpu_gib: float, *settings: str) -> int:
        recipe = from_json(
            small_recipe(tmp_path, "rollout.batch_size=8", "rollout.max_new_tokens=50", *settings)
        )
        found = estimate_run(recipe, Machine(ranks=1, gpu_bytes=int(gpu_gib * 2**30)), [5, 7])
        held = {phase.name for phase in found.phases if "KV cache" in phase.device}
        assert "generate" in held and "update policy" not in held  # the engine sleeps then
        return next(phase.device["KV cache"] for phase in found.phases if phase.name == "generate")

    assert cache(80, "rollout.kv_cache_gib=2.5") == 2.5 * 2**30
    whole = cache(80)
    assert 0 < cache(0.005) < whole == cache(8)
    assert cache(80, "rollout.max_new_tokens=600") > whole


def test_what_of_a_base_is_not_in_4_bits_is_counted_in_the_dtype_that_it_computes_in(tmp_path):
    folder = model_folder(tmp_path / "model", "llama", DENSE)
    settings = (*COMMON, f"model.path={folder}", "model.lora.r=8", "model.lora.base=nf4")
    held = []
    for dtype in ("float32", "bfloat16"):
        recipe = from_json(small_recipe(tmp_path / "run", *settings, f"model.compute_dtype={dtype}"))
        found = estimate_run(recipe, Machine(ranks=1), prompt_lengths(recipe)[0])
        held.append(found.phases[0].device["policy weights"])
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    others = 2 * vocabulary * 64 + (2 * 4 + 1) * 64  # embeddings, head and norms
    assert held[0] - held[1] == 2 * others


@pytest.mark.parametrize("gpu_bytes", [None, 80 * 2**30])
def test_evaluations_are_counted_as_long_and_as_shaped_as_they_are(tmp_path, gpu_bytes):
    """Their completions counted as many, but each as one of training: a longer one did not fit the memory that was planned."""
    common = (
        "output.eval_every=1",
        "output.eval_prompts=8",
        "rollout.batch_size=8",
        "train.prompts_per_step=1",
    )

    def sampling(*settings: str) -> dict[str, int]:
        recipe = from_json(small_recipe(tmp_path, *common, *settings))
        found = estimate_run(recipe, Machine(ranks=1, gpu_bytes=gpu_bytes), [5, 7])
        return next(dict(phase.device) for phase in found.phases if phase.name == "generate")

    short, as_training = sampling(), sampling("rollout.max_new_tokens=3000")
    long = sampling("evaluation.max_new_tokens=3000")
    assert long["KV cache"] == as_training["KV cache"] > 5 * short["KV cache"]
    assert sampling("evaluation.max_new_tokens=3000", "output.eval_every=0") == sampling(
        "output.eval_every=0"
    )
    shaped = [
        sampling("evaluation.temperature=0.7", *own)["decoding"] for own in ((), ("evaluation.top_p=0.9",))
    ]
    assert shaped[1] >= shaped[0] + 8 * 14 * 28 * (gpu_bytes is not None)
    played = ("environment.name=my_module:Game", "environment.max_tokens=40")
    assert sampling(*played)["KV cache"] == sampling(*played, "evaluation.max_new_tokens=9")["KV cache"]
