"""verl's configs, as `verl.trainer.main_ppo` reads them."""

from __future__ import annotations

import fnmatch

from shardproof.config.imported.draft import Draft, Foreign, Same, copy
from shardproof.config.imported.engine_arguments import named_arguments
from shardproof.config.imported.shared_settings import (
    KEEP_ALL,
    as_list,
    as_policy,
    draw_evaluations,
    evaluate_all,
    fill_in_missing,
    held_out,
    steps,
    trackers,
    train_sources,
)
from shardproof.config.imported.verl_adapters import adapters
from shardproof.config.imported.verl_async import running_ahead, updates_per_rate
from shardproof.config.imported.verl_objective import ACTOR, objective
from shardproof.config.imported.verl_rewards import rewards
from shardproof.config.imported.verl_unneeded import UNNEEDED

_FSDP = f"{ACTOR}.fsdp_config"
ROLLOUT, MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_DTYPES = {"fp32": "float32", "float32": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16"}
_DTYPES |= {"fp16": "float16", "float16": "float16"}
# Of the critic's optimizer and updates, with verl's own values.
_LIKE_THE_POLICY = {
    "ppo_epochs": 1,
    "ppo_mini_batch_size": 256,
    "loss_agg_mode": "token-mean",
    "grad_clip": 1.0,
    "optim.clip_grad": 1.0,
    "optim.weight_decay": 0.01,
    "optim.betas": [0.9, 0.999],
    "optim.lr_warmup_steps": -1,
    "optim.lr_warmup_steps_ratio": 0.0,
    "optim.lr_scheduler_type": "constant",
    "optim.warmup_style": "constant",
    "optim.lr_decay_style": "constant",
    "optim.min_lr_ratio": 0.0,
    "optim.min_lr": 0.0,
}
_TABLE = (
    Same(f"{MODEL}.path", "model.path"),
    Same(f"{MODEL}.trust_remote_code", "model.trust_remote_code"),
    Same(f"{MODEL}.enable_gradient_checkpointing", "model.checkpoint_activations", True),
    Same(f"{ACTOR}.fsdp_config.offload_policy", "model.cpu_offload", False),
    Same(f"{ACTOR}.fsdp_config.param_offload", "rollout.offload_policy", False),
    Same("data.prompt_key", "data.prompt_column", "prompt"),
    Same("data.max_prompt_length", "data.max_prompt_tokens", 512),
    Same("data.filter_overlong_prompts", "data.too_long", False, lambda drops: "drop" if drops else "refuse"),
    Same("data.apply_chat_template_kwargs", "data.chat_template_kwargs"),
    Same("data.train_batch_size", "train.prompts_per_step", 1024),
    Same("data.seed", "train.seed"),
    Same(f"{ROLLOUT}.n", "rollout.group_size", 1),
    Same(f"{ROLLOUT}.temperature", "rollout.temperature", 1.0, float),
    Same(f"{ROLLOUT}.top_p", "rollout.top_p", 1.0, float),
    Same(f"{ACTOR}.ppo_epochs", "algorithm.epochs_per_batch", 1),
    Same(f"{ACTOR}.entropy_coeff", "algorithm.entropy_coef", 0.0, float),
    Same(f"{ACTOR}.optim.lr", "optimizer.lr", 1e-6, float),
    Same(f"{ACTOR}.optim.weight_decay", "optimizer.weight_decay", 0.01, float),
    Same(f"{ACTOR}.optim.betas", "optimizer.betas", [0.9, 0.999]),
    Same("trainer.n_gpus_per_node", "train.ranks", 8),
    Same("trainer.project_name", "output.project", "verl_examples", str),
    Same("trainer.experiment_name", "output.run_name", None, str),
    Same("trainer.default_local_dir", "output.folder"),
    Same("trainer.max_actor_ckpt_to_keep", "output.keep", KEEP_ALL),
)


def translate(foreign: Foreign) -> Draft:
    """The recipe of a config of verl's PPO trainer."""
    draft = Draft()
    copy(draft, foreign, _TABLE)
    _model(draft, foreign)
    _data(draft, foreign)
    _engine(draft, foreign)
    objective(draft, foreign)
    running_ahead(draft, foreign)
    _schedule(draft, foreign, ACTOR)
    _critic(draft, foreign)
    _trainer(draft, foreign)
    fill_in_missing(draft, rewarded=True)
    draft.sort_left(foreign, UNNEEDED)
    return draft


def _model(draft: Draft, foreign: Foreign) -> None:
    named = {key: foreign.take(key, "fsdp") for key in (f"{ACTOR}.strategy", f"{_FSDP}.strategy")}
    key, strategy = next((each for each in named.items() if each[1] != "fsdp"), (f"{ACTOR}.strategy", "fsdp"))
    draft.put("model.strategy", "fsdp2" if strategy == "fsdp2" else "fsdp1", key)
    if strategy not in ("fsdp", "fsdp2"):
        draft.gaps[f"{key}={strategy!r}"] = "models are sharded by FSDP"
    draft.lack(foreign, "model_engine", "models are sharded by FSDP", unless=("dp",))
    for key in fnmatch.filter(foreign.left, "*@*"):
        draft.lack(foreign, key, "names a config of verl's, which is not read")
    _sharding(draft, foreign)
    adapters(draft, foreign, MODEL, "model.lora")
    if foreign.take(f"{ACTOR}.use_dynamic_bsz", False):
        size = int(foreign.take(f"{ACTOR}.ppo_max_token_len_per_gpu", 16384))
        draft.put("train.micro_batch_tokens", size, f"{ACTOR}.ppo_max_token_len_per_gpu")
    draft.lack(
        foreign, f"{MODEL}.external_lib", "install it, and import it from a module that the recipe names"
    )
    draft.lack(foreign, f"{MODEL}.custom_chat_template", "put the template into the model's folder")
    _overrides(draft, foreign)


def _overrides(draft: Draft, foreign: Foreign) -> None:
    """Changes of the model's config, such as its positions; without effect are dropouts of 0."""
    root = f"{MODEL}.override_config"
    for key, value in foreign.section(root).items():
        if value not in (None, {}) and not key.endswith("attn_implementation"):
            is_off = key.endswith(("dropout", "pdrop")) and not value
            if not is_off:
                draft.gaps[f"{root}.{key}={value!r}"] = "change config.json in the model's folder"
    draft.skip(foreign, "*.override_config*", "see the policy's")
    terms = {
        "moe_aux_loss_coeff": "see algorithm.router_coef",
        "moe_z_loss_coeff": "routers have no such loss",
    }
    terms |= dict.fromkeys(("attention_dropout", "hidden_dropout"), "models are trained without dropout")
    for name, why in terms.items():
        key = f"{ACTOR}.megatron.override_transformer_config.{name}"
        draft.lack(foreign, key, why, unless=(0, 0.0))


def _sharding(draft: Draft, foreign: Foreign) -> None:
    parallel = foreign.either(
        f"{ACTOR}.ulysses_sequence_parallel_size", f"{_FSDP}.ulysses_sequence_parallel_size"
    )
    clip = foreign.either(f"{ACTOR}.optim.clip_grad", f"{ACTOR}.grad_clip")
    mixed = f"{_FSDP}.mixed_precision.param_dtype"
    compute = mixed if foreign.has(mixed) else f"{_FSDP}.dtype"
    table = (
        Same(parallel, "model.sequence_parallel", 1),
        Same(clip, "optimizer.max_grad_norm", 1.0, float),
        Same(f"{_FSDP}.model_dtype", "model.param_dtype", "fp32", lambda name: _DTYPES[name]),
        Same(compute, "model.compute_dtype", "bfloat16", lambda name: _DTYPES[name]),
        Same(f"{_FSDP}.reshard_after_forward", "model.reshard_after_forward"),
    )
    copy(draft, foreign, table)
    draft.skip(foreign, f"{ACTOR}.grad_clip", "optim.clip_grad says it")
    draft.skip(foreign, f"{_FSDP}.dtype", "mixed_precision.param_dtype says it")
    why = "gradients are summed in float32"
    draft.lack(foreign, f"{_FSDP}.mixed_precision.reduce_dtype", why, unless=("fp32", "float32"))
    size = int(foreign.take(f"{_FSDP}.fsdp_size", -1))
    ranks = int(draft.values["train.ranks"]) * int(foreign.take("trainer.nnodes", 1))
    if 0 < size < ranks and ranks % size == 0:
        draft.put("model.replicate", ranks // size, f"{_FSDP}.fsdp_size")


def _data(draft: Draft, foreign: Foreign) -> None:
    if files := as_list(foreign.take("data.train_files")):
        draft.put("data.train", train_sources(files), "data.train_files")
    held_out(draft, as_list(foreign.take("data.val_files")), "data.val_files")
    for key in ("train_max_samples", "val_max_samples"):
        draft.lack(foreign, f"data.{key}", "all rows are read", unless=(-1,))
    draft.lack(
        foreign, "data.truncation", "prompts are never cut; they are refused or dropped", unless=("error",)
    )
    draft.lack(foreign, "data.shuffle", "rows are always shuffled, by train.seed", unless=(True,))
    size = draft.values["train.prompts_per_step"]
    draft.lack(foreign, "data.gen_batch_size", "a round draws as many prompts as are missing", unless=(size,))
    for key in ("data.custom_cls.path", "data.sampler.class_path", "data.datagen.path"):
        draft.lack(foreign, key, "write the rows into a file, or use data.curriculum")
    for key in ("custom_cls", "sampler", "datagen"):
        draft.skip(foreign, f"data.{key}.*", "see data.curriculum")


def _engine(draft: Draft, foreign: Foreign) -> None:
    length = foreign.take(f"{ROLLOUT}.response_length", foreign.take("data.max_response_length", 512))
    draft.put("rollout.max_new_tokens", int(length), "data.max_response_length")
    if (k := foreign.take(f"{ROLLOUT}.top_k", -1)) > 0:
        draft.put("rollout.top_k", int(k), f"{ROLLOUT}.top_k")
    engine = foreign.take(f"{ROLLOUT}.name", "vllm")
    draft.put("rollout.engine", "embedded" if engine == "hf" else "vllm", f"{ROLLOUT}.name")
    if engine not in ("vllm", "hf"):
        draft.gaps[f"{ROLLOUT}.name={engine!r}"] = "vLLM is used"
    if engine != "hf":
        table = (
            Same(f"{ROLLOUT}.gpu_memory_utilization", "rollout.vllm.gpu_memory_utilization", 0.5, float),
            Same(f"{ROLLOUT}.tensor_model_parallel_size", "rollout.vllm.tensor_parallel_size", 2),
            Same(f"{ROLLOUT}.max_model_len", "rollout.vllm.max_model_len"),
            Same(f"{ROLLOUT}.free_cache_engine", "rollout.sleep", True),
        )
        copy(draft, foreign, table)
        each = draft.values["rollout.vllm.tensor_parallel_size"]
        origin = f"trainer.n_gpus_per_node / {ROLLOUT}.tensor_model_parallel_size"
        if isinstance(each, int):  # else it is to be filled in
            draft.put("rollout.vllm.replicas", max(1, int(draft.values["train.ranks"]) // each), origin)
    named_arguments(draft, foreign, ROLLOUT)
    _evaluation(draft, foreign, engine)
    if foreign.take(f"{ROLLOUT}.multi_turn.enable", False):
        draft.gaps[f"{ROLLOUT}.multi_turn.enable=True"] = "write an [environment]: see docs/environments.md"
    draft.skip(foreign, f"{ROLLOUT}.multi_turn.*", "see docs/environments.md")
    copy(draft, foreign, [Same(f"{ROLLOUT}.enable_rollout_routing_replay", "rollout.replay_experts", None)])
    why = "name it in rollout.vllm.args; see docs/fp8.md"
    draft.lack(foreign, f"{ROLLOUT}.quantization", why)
    for key, own in (("do_sample", True), ("ignore_eos", False), ("over_sample_rate", 0)):
        draft.lack(foreign, f"{ROLLOUT}.{key}", "completions are drawn, to their end", unless=(own,))


def _evaluation(draft: Draft, foreign: Foreign, engine: str) -> None:
    """verl's servers draw at the temperature whatever do_sample says, which its engine 'hf' alone reads."""
    sampled = foreign.take(f"{ROLLOUT}.val_kwargs.do_sample", False) or engine != "hf"
    temperature = float(foreign.take(f"{ROLLOUT}.val_kwargs.temperature", 0))
    draft.put("evaluation.temperature", temperature if sampled else 0.0, f"{ROLLOUT}.val_kwargs.temperature")
    draft.put(
        "evaluation.top_p",
        float(foreign.take(f"{ROLLOUT}.val_kwargs.top_p", 1.0)),
        f"{ROLLOUT}.val_kwargs.top_p",
    )
    number = int(foreign.take(f"{ROLLOUT}.val_kwargs.n", 1))
    is_greedy = draft.values["evaluation.temperature"] == 0.0  # all completions of a row would be the same
    draft.put("output.eval_samples", 1 if is_greedy else number, f"{ROLLOUT}.val_kwargs.n")
    draw_evaluations(draft, foreign, f"{ROLLOUT}.val_kwargs", ["top_k"])


def _is_megatron(foreign: Foreign) -> bool:
    """Whether a config is of verl's Megatron trainer, which a script may name by its own settings alone."""
    named = foreign.take(f"{ACTOR}.strategy", foreign.take("model_engine"))
    own = any(key.startswith(f"{ACTOR}.megatron.") for key in foreign.values)
    return bool(named == "megatron" or (named is None and own))


def _schedule(draft: Draft, foreign: Foreign, root: str) -> None:
    names = [f"{root}.optim.{name}" for name in ("warmup_style", "lr_scheduler_type", "lr_decay_style")]
    key = next(filter(foreign.has, names), names[1])  # the oldest name wins where it is set, as in verl
    kind = str(foreign.take(key, "constant"))
    known = kind in ("constant", "cosine") or (kind == "linear" and key == names[2])
    draft.put("optimizer.schedule", kind if known else "constant", key)
    if not known:
        draft.gaps[f"{key}={kind!r}"] = "the learning rate stays constant"
    for name in names:
        foreign.take(name)
    ratio, lowest = f"{root}.optim.min_lr_ratio", f"{root}.optim.min_lr"
    if known and kind != "constant":
        share = float(foreign.take(lowest, 0.0)) / draft.values["optimizer.lr"]
        draft.put("optimizer.final_ratio", float(foreign.take(ratio, share)), foreign.either(ratio, lowest))
        draft.lack(foreign, f"{root}.optim.lr_decay_steps", "the learning rate falls until the last step")
    for name in (ratio, lowest, f"{root}.optim.lr_decay_steps"):
        foreign.take(name)
    _warmup(draft, foreign, root)
    own_values = {
        "num_cycles": (0.5,),
        "init_lr_ratio": (0, 0.0),
        "lr_warmup_init": (0, 0.0),
        "zero_indexed_step": (True,),
    }
    for key, own in own_values.items():
        draft.lack(foreign, f"{root}.optim.{key}", "the schedule has no such setting", unless=own)
    overridden = f"{root}.optim.override_optimizer_config"
    for key in (f"{root}.optim.eps", f"{overridden}.eps", f"{overridden}.adam_eps"):
        copy(draft, foreign, [Same(key, "optimizer.eps", None, float)])
    why = "the weight decay is AdamW's"
    draft.lack(foreign, f"{overridden}.decoupled_weight_decay", why, unless=(True,))
    name = str(foreign.take(f"{root}.optim.optimizer", "AdamW"))
    if name.lower() in ("adamw8bit", "pagedadamw8bit"):
        draft.put("optimizer.name", "adamw_8bit", f"{root}.optim.optimizer")
    elif name.lower() not in ("adam", "adamw"):
        what = "AdamW is used; name a class of yours in optimizer.name"
        draft.gaps[f"{root}.optim.optimizer={name!r}"] = what


def _warmup(draft: Draft, foreign: Foreign, root: str) -> None:
    """verl's learning rate moves once per step, ours with every update: its warm-up is counted in steps."""
    number = int(foreign.take(f"{root}.optim.lr_warmup_steps", -1))
    ratio = float(foreign.take(f"{root}.optim.lr_warmup_steps_ratio", 0.0))
    by_ratio = number < 0 or (number == 0 and _is_megatron(foreign))  # 0 is a number for FSDP alone
    updates = updates_per_rate(draft, foreign) * int(draft.values["algorithm.epochs_per_batch"])
    if number > 0:
        origin = f"{root}.optim.lr_warmup_steps={number}, of {updates} updates each"
        draft.put("optimizer.warmup_steps", number * updates, origin)
    elif by_ratio and ratio:
        draft.put("optimizer.warmup_ratio", ratio, f"{root}.optim.lr_warmup_steps_ratio")
    if number > 0 or (by_ratio and ratio):
        draft.put("optimizer.warmup_from_zero", True, "verl's warm-up")


def _critic(draft: Draft, foreign: Foreign) -> None:
    if draft.values["algorithm.name"] == "ppo":
        table = (
            Same("critic.model.path", "critic.path"),
            Same("critic.optim.lr", "critic.lr", 1e-5, float),
            Same("critic.cliprange_value", "algorithm.value_clip", 0.5, float),
            Same("algorithm.lam", "algorithm.gae_lambda", 1.0, float),
            Same("trainer.critic_warmup", "algorithm.critic_warmup_steps", 0),
        )
        copy(draft, foreign, table)
        adapters(draft, foreign, "critic.model", "critic.lora")
        as_policy(draft, foreign, "critic", ACTOR, _LIKE_THE_POLICY)
    else:
        draft.skip(foreign, "critic.*", "the algorithm has no critic")
    for key in ("algorithm.lam", "trainer.critic_warmup"):
        foreign.take(key)
    rewards(draft, foreign)


def _trainer(draft: Draft, foreign: Foreign) -> None:
    epochs = float(foreign.take("trainer.total_epochs", 30))
    limit, per_step = "trainer.total_training_steps", 1
    if foreign.has("rollout.total_rollout_steps"):  # prompts, of trainers that sample on GPUs of their own
        limit, per_step = "rollout.total_rollout_steps", draft.values["train.prompts_per_step"]
    steps(draft, foreign.take(limit), epochs, per_step, limit, "trainer.total_epochs")
    foreign.take("trainer.total_training_steps")
    tests = "rollout.test_freq" if foreign.has("rollout.test_freq") else "trainer.test_freq"
    foreign.take("trainer.test_freq")
    for key, ours in (("trainer.save_freq", "output.save_every"), (tests, "output.eval_every")):
        every = int(foreign.take(key, -1))
        if ours == "output.save_every" or "data.evaluation" in draft.values:
            draft.put(ours, max(every, 0), key)
    trackers(draft, foreign.take("trainer.logger", ["wandb"]), "trainer.logger")
    nodes = int(foreign.take("trainer.nnodes", 1))
    if nodes > 1:
        draft.gaps[f"trainer.nnodes={nodes}"] = (
            f"start with `shardproof train --nnodes {nodes}`: see docs/multi-node.md"
        )
    evaluate_all(draft, "verl")
    draft.lack(
        foreign, "trainer.val_only", "a run trains; it evaluates before its first step", unless=(False,)
    )
    draft.lack(foreign, "trainer.ref_update_freq", "see algorithm.reference_sync_every", unless=(0, -1))
    draft.lack(foreign, "trainer.v1.trainer_mode", "see rollout.ahead", unless=("sync",))
    if foreign.take("distillation.enabled", False):
        draft.gaps["distillation.enabled=True"] = "set algorithm.name='distillation', and a [teacher]"
        draft.skip(foreign, "distillation.*", "see docs/algorithms.md")
    foreign.take("trainer.val_before_train")  # an evaluation before the first step is always made
