"""SkyRL's configs, as its `main_base` reads them: with the names of today, and those of before `generator.inference_engine`."""

from __future__ import annotations

from typing import Any

from shardproof.config.imported.draft import Draft, Foreign, Same, copy
from shardproof.config.imported.engine_arguments import engine_arguments
from shardproof.config.imported.shared_settings import (
    KEEP_ALL,
    as_list,
    draw_evaluations,
    evaluate_all,
    fill_in_missing,
    held_out,
    steps,
    trackers,
    train_sources,
)
from shardproof.config.imported.skyrl_objective import adapters, objective

_POLICY, _SAMPLING = "trainer.policy", "generator.sampling_params"
_ENGINE, _EVAL = "generator.inference_engine", "generator.eval_sampling_params"
_BY_ENGINE = "the engine chooses it: see docs/vllm.md"
_BY_TURNS = "see docs/environments.md"
_UNNEEDED = {
    "defaults": "names configs of SkyRL",
    "*deepspeed*": "models are sharded by FSDP",
    "*megatron*": "models are sharded by FSDP",
    "trainer.placement.*": "every rank has its part of every model: see docs/architecture.md",
    "*.fsdp_config.*": "see model.strategy",
    "*.record_memory": "see docs/out-of-memory.md",
    "*.use_torch_compile": "see model.compile",
    "*.torch_profiler_config.*": "see docs/performance.md",
    "*.language_model_only": "images are not read",
    "*.offload_after_step": "see rollout.offload_policy",
    "*.lora.lora_sync_path": "see rollout.vllm.lora",
    "*.lora.max*loras": "see rollout.vllm.lora",
    "trainer.micro_*": "micro-batches are counted in tokens: see train.micro_batch_tokens",
    "trainer.use_sample_packing": "batches are never padded",
    "trainer.remove_microbatch_padding": "batches are never padded",
    "trainer.flash_attn": "attention is chosen for the device",
    "trainer.gradient_checkpointing_use_reentrant": "see model.checkpoint_activations",
    "trainer.disable_fast_tokenizer": "the model's own tokenizer is used",
    "trainer.resume_*": "a run that is started again goes on",
    "trainer.dump_*": "see output.samples_per_step",
    "trainer.*example_interval": "see output.samples_per_step",
    "trainer.num_logger_*": "see output.samples_per_step",
    "trainer.hf_save_interval": "the final model is written; see evaluation.best",
    "trainer.export_path": "see output.folder",
    "trainer.log_path": "see output.folder",
    "trainer.*_chunk_*": "log-probs and entropy are computed in chunks",
    "trainer.fused_lm_head_*": "kernels are chosen for the device",
    "trainer.use_expandable_segments": "see docs/out-of-memory.md",
    "trainer.enable_ray_gpu_monitor": "see docs/ray.md",
    "trainer.recompute_old_logprobs_per_minibatch": "old log-probs are computed once per step",
    "trainer.eval_batch_size": "see rollout.batch_size",
    "trainer.eval_before_train": "an evaluation before the first step is always made",
    "trainer.critic.*": "see [critic]",
    "trainer.critic_mini_batch_size": "see algorithm.updates_per_epoch",
    "trainer.ref.*": "see [reference]",
    "trainer.reward.*": "see reward.models",
    "trainer.sequence_parallel_backend": "sequences are split by Ulysses",
    "trainer.fully_async.*": "see docs/running-ahead.md",
    "data.dataloader.*": "data is read once per host",
    f"{_ENGINE}.*": _BY_ENGINE,
    "generator.model_name": "see model.path",
    "generator.fully_sharded_loras": _BY_ENGINE,
    "generator.batched": "conversations of one turn are always sampled together",
    "generator.async_engine": _BY_ENGINE,
    "generator.use_cache_salt": _BY_ENGINE,
    "generator.rate_limit.*": "see rollout.batch_size",
    "generator.max_input_length": "see data.max_prompt_tokens",
    "generator.use_conversation_multi_turn": _BY_TURNS,
    "generator.append_eos_token_after_stop_str_in_multi_turn": _BY_TURNS,
    "generator.weight_*": "see rollout.vllm.transport",
    "generator.override_existing_update_group": "see rollout.vllm.transport",
    "generator.*http_endpoint*": "see rollout.vllm.url",
    "generator.vllm_*": _BY_ENGINE,
    "generator.enable_*": _BY_ENGINE,
    "generator.enforce_eager": _BY_ENGINE,
    "generator.max_num_*": _BY_ENGINE,
    "generator.*_parallel_size": _BY_ENGINE,
    "generator.inference_engine_*_parallel_size": _BY_ENGINE,
    "*.sampling_params.logprobs": "log-probs of what was drawn are always there",
    "*.eval_sampling_params.logprobs": "log-probs of what was drawn are always there",
    "environment.max_env_workers": "see environment.num_workers",
    "environment.skyrl_gym*": "see [environment]",
    "skyrl_gym_config*": "see [environment]",
}
_TABLE = (
    Same(f"{_POLICY}.model.path", "model.path", "Qwen/Qwen2.5-1.5B-Instruct"),
    Same(f"{_POLICY}.sequence_parallel_size", "model.sequence_parallel", 1),
    Same(f"{_POLICY}.fsdp_config.cpu_offload", "model.cpu_offload", False),
    Same("trainer.gradient_checkpointing", "model.checkpoint_activations", True),
    Same(f"{_POLICY}.optimizer_config.lr", "optimizer.lr", 1e-6, float),
    Same(f"{_POLICY}.optimizer_config.adam_betas", "optimizer.betas", [0.9, 0.999]),
    Same(f"{_POLICY}.optimizer_config.weight_decay", "optimizer.weight_decay", 0.01, float),
    Same(f"{_POLICY}.optimizer_config.max_grad_norm", "optimizer.max_grad_norm", 1.0, float),
    Same("trainer.train_batch_size", "train.prompts_per_step", 1024),
    Same("trainer.seed", "train.seed", 42),
    Same("trainer.max_prompt_length", "data.max_prompt_tokens", 512),
    Same("trainer.update_epochs_per_batch", "algorithm.epochs_per_batch", 1),
    Same("generator.n_samples_per_prompt", "rollout.group_size", 5),
    Same(f"{_SAMPLING}.max_generate_length", "rollout.max_new_tokens", 1024),
    Same(f"{_SAMPLING}.temperature", "rollout.temperature", 1.0, float),
    Same(f"{_SAMPLING}.top_p", "rollout.top_p", 1.0, float),
    Same(f"{_SAMPLING}.stop", "rollout.stop"),
    Same("generator.chat_template_kwargs", "data.chat_template_kwargs"),
    Same("trainer.ckpt_path", "output.folder"),
    Same("trainer.ckpt_interval", "output.save_every", 10, lambda every: max(int(every), 0)),
    Same("trainer.max_ckpts_to_keep", "output.keep", -1, lambda num: num if num > 0 else KEEP_ALL),
    Same("trainer.project_name", "output.project", "skyrl", str),
    Same("trainer.run_name", "output.run_name", None, str),
)
_SCHEDULES = {
    "constant_with_warmup": "constant",
    "constant": "constant",
    "linear": "linear",
    "cosine": "cosine",
}


def translate(foreign: Foreign) -> Draft:
    """The recipe of a config of SkyRL's trainer."""
    draft = Draft()
    copy(draft, foreign, _TABLE)
    _model(draft, foreign)
    _schedule(draft, foreign)
    _data(draft, foreign)
    _engine(draft, foreign)
    objective(draft, foreign)
    limit, epochs = foreign.take("trainer.max_training_steps"), float(foreign.take("trainer.epochs", 1))
    steps(draft, limit, epochs, 1, "trainer.max_training_steps", "trainer.epochs")
    trackers(draft, foreign.take("trainer.logger", "wandb"), "trainer.logger")
    _evaluation(draft, foreign)
    fill_in_missing(draft, rewarded=True)
    draft.sort_left(foreign, _UNNEEDED)
    return draft


def _is_old(foreign: Foreign) -> bool:
    """Whether a config has the names of before `generator.inference_engine`, when 'fsdp' was FSDP1."""
    old = ("num_inference_engines", "inference_engine_tensor_parallel_size", "backend", "run_engines_locally")
    return any(foreign.has(f"generator.{key}") for key in old)


def _model(draft: Draft, foreign: Foreign) -> None:
    strategy = foreign.take("trainer.strategy", "fsdp2")
    fsdp1 = strategy == "fsdp" and _is_old(foreign)
    draft.put("model.strategy", "fsdp1" if fsdp1 else "fsdp2", "trainer.strategy")
    if strategy not in ("fsdp", "fsdp2"):
        draft.gaps[f"trainer.strategy={strategy!r}"] = "models are sharded by FSDP"
    gpus = foreign.take("trainer.placement.policy_num_gpus_per_node", 4 if _is_old(foreign) else 1)
    draft.put("train.ranks", int(gpus), "trainer.placement.policy_num_gpus_per_node")
    nodes = int(foreign.take("trainer.placement.policy_num_nodes", 1))
    if nodes > 1:
        what = f"start with `shardproof train --nnodes {nodes}`"
        draft.gaps[f"trainer.placement.policy_num_nodes={nodes}"] = what
    adapters(draft, foreign, f"{_POLICY}.model.lora", "model.lora")
    compute = "bfloat16" if foreign.take("trainer.bf16", True) else "float32"
    draft.put("model.compute_dtype", compute, "trainer.bf16")
    if (most := int(foreign.take("trainer.max_tokens_per_microbatch", -1))) > 0:
        draft.put("train.micro_batch_tokens", most, "trainer.max_tokens_per_microbatch")
    other = foreign.take("trainer.ref.model.path")
    if other is not None and other != draft.values["model.path"]:
        draft.put("reference.path", other, "trainer.ref.model.path")
    foreign.take(foreign.either(f"{_ENGINE}.model_dtype", "generator.model_dtype"))
    why = "what is sampled and what is trained have one temperature: see rollout.temperature"
    drawn = draft.values["rollout.temperature"]
    draft.lack(foreign, "trainer.algorithm.temperature", why, unless=(drawn,))
    draft.lack(foreign, f"{_POLICY}.inference_only_init", "see model.path", unless=(False,))
    _sharding(draft, foreign, int(gpus) * nodes)


def _sharding(draft: Draft, foreign: Foreign, ranks: int) -> None:
    root = f"{_POLICY}.fsdp_config"
    size = int(foreign.take(f"{root}.fsdp_size", -1))
    if 0 < size < ranks and ranks % size == 0:
        draft.put("model.replicate", ranks // size, f"{root}.fsdp_size")
    gathers = foreign.take(f"{root}.reshard_after_forward")
    if isinstance(gathers, bool):
        draft.put("model.reshard_after_forward", gathers, f"{root}.reshard_after_forward")
    why = "see model.compute_dtype"
    draft.lack(foreign, f"{root}.mixed_precision.param_dtype", why, unless=("bf16", "bfloat16"))


def _schedule(draft: Draft, foreign: Foreign) -> None:
    root = f"{_POLICY}.optimizer_config"
    kind = foreign.take(f"{root}.scheduler", "constant_with_warmup")
    draft.put("optimizer.schedule", _SCHEDULES.get(kind, "constant"), f"{root}.scheduler")
    if kind not in _SCHEDULES:
        draft.gaps[f"{root}.scheduler={kind!r}"] = "the learning rate stays constant"
    number = int(foreign.take(f"{root}.num_warmup_steps", 0))
    if number and kind != "constant":
        draft.put("optimizer.warmup_steps", number, f"{root}.num_warmup_steps")
        draft.put("optimizer.warmup_from_zero", True, "transformers' warm-up")


def _data(draft: Draft, foreign: Foreign) -> None:
    if files := as_list(foreign.take("data.train_data")):
        draft.put("data.train", train_sources(files), "data.train_data")
    held_out(draft, as_list(foreign.take("data.val_data")), "data.val_data")
    draft.put("data.too_long", "drop", "SkyRL leaves prompts out that are too long")
    what = "SkyRL has the answer in reward_spec.ground_truth: copy it into a column"
    draft.ask("data.answer_column", "answer", what)
    name = foreign.take("environment.env_class")
    if name is not None:
        why = (
            "gsm8k is the reward 'numeric'"
            if name == "gsm8k"
            else "write it as an [environment], or as a reward function"
        )
        draft.gaps[f"environment.env_class={name!r}"] = why
    if foreign.take("generator.zero_reward_on_non_stop", False):
        draft.gaps["generator.zero_reward_on_non_stop=True"] = "use algorithm.overlong='mask'"
    turns = int(foreign.take("generator.max_turns", 1))
    if turns > 1:
        draft.gaps[f"generator.max_turns={turns}"] = f"write an [environment] with max_turns = {turns}"
    if not foreign.has("generator.chat_template.name_or_path"):
        draft.skip(foreign, "generator.chat_template.*", "the model's own template is used")
    for key in ("step_wise_trajectories", "vision_language_generator", "merge_stepwise_output"):
        draft.lack(foreign, f"generator.{key}", "nothing in a recipe corresponds to it", unless=(False,))


def _engine(draft: Draft, foreign: Foreign) -> None:
    def name(today: str, before: str = "") -> str:
        return foreign.either(f"{_ENGINE}.{today}", f"generator.{before or today}")

    draft.put("rollout.engine", "vllm", name("backend"))
    draft.lack(foreign, name("backend"), "vLLM is used", unless=("vllm",))
    if (k := foreign.take(f"{_SAMPLING}.top_k", -1)) > 0:
        draft.put("rollout.top_k", int(k), f"{_SAMPLING}.top_k")
    if (p := float(foreign.take(f"{_SAMPLING}.min_p", 0.0))) > 0:
        draft.put("rollout.min_p", p, f"{_SAMPLING}.min_p")
    engine_arguments(draft, foreign, f"{_SAMPLING}.additional_kwargs")
    draft.lack(foreign, f"{_SAMPLING}.repetition_penalty", "SkyRL does not pass it on", unless=(1, 1.0))
    copy(draft, foreign, [Same(name("engine_init_kwargs.max_model_len"), "rollout.vllm.max_model_len")])
    urls: Any = foreign.take(name("external_server_urls", "remote_inference_engine_urls"))
    urls = as_list(urls) or as_list(foreign.take(f"{_ENGINE}.external_proxy_url"))
    if not foreign.take(name("run_engines_locally"), True):
        addresses = [url if "://" in url else f"http://{url}" for url in urls]
        draft.put("rollout.vllm.mode", "server", name("run_engines_locally"))
        draft.put("rollout.vllm.url", addresses, name("external_server_urls", "remote_inference_engine_urls"))
    else:
        parallel = name("tensor_parallel_size", "inference_engine_tensor_parallel_size")
        table = (
            Same(name("num_engines", "num_inference_engines"), "rollout.vllm.replicas", 1),
            Same(parallel, "rollout.vllm.tensor_parallel_size", 4 if _is_old(foreign) else 1),
            Same(name("gpu_memory_utilization"), "rollout.vllm.gpu_memory_utilization", 0.8, float),
        )
        copy(draft, foreign, table)
    if foreign.take("trainer.fully_async.enabled", False):
        ahead = int(foreign.take("trainer.fully_async.max_staleness_steps", 4))
        draft.put("rollout.ahead", ahead, "trainer.fully_async.max_staleness_steps")
        draft.put("rollout.order", "finished", "trainer.fully_async.enabled")


def _evaluation(draft: Draft, foreign: Foreign) -> None:
    """SkyRL evaluates greedily, unless settings for it are given: then those that are not have their defaults, which before
    `generator.inference_engine` were greedy as well, and as long as in training."""
    given = any(key.startswith(f"{_EVAL}.") for key in foreign.values)
    apart = given and not _is_old(foreign)
    temperature = float(foreign.take(f"{_EVAL}.temperature", 1.0 if apart else 0.0))
    draft.put("evaluation.temperature", temperature, f"{_EVAL}.temperature")
    draft.put("evaluation.top_p", float(foreign.take(f"{_EVAL}.top_p", 1.0)), f"{_EVAL}.top_p")
    if given:
        own = 1024 if apart else draft.values["rollout.max_new_tokens"]
        length = int(foreign.take(f"{_EVAL}.max_generate_length", own))
        draft.put("evaluation.max_new_tokens", length, f"{_EVAL}.max_generate_length")
    draw_evaluations(draft, foreign, _EVAL, ["top_k", "min_p"])
    key = f"{_EVAL}.repetition_penalty"
    draft.lack(foreign, key, "evaluations draw as rollout says", unless=(1, 1.0))
    draft.lack(
        foreign,
        f"{_EVAL}.stop",
        "evaluations stop as rollout says",
        unless=(draft.values.get("rollout.stop"),),
    )
    number = int(foreign.take("generator.eval_n_samples_per_prompt", 1))
    # Greedy completions of a row would all be the same.
    draft.put("output.eval_samples", number if temperature else 1, "generator.eval_n_samples_per_prompt")
    every = int(foreign.take("trainer.eval_interval", 5))
    if "data.evaluation" in draft.values:
        draft.put("output.eval_every", max(every, 0), "trainer.eval_interval")
    evaluate_all(draft, "SkyRL")
