"""What SkyRL's configs say about the objective: advantages, loss, KL, corrections, and which prompts count."""

from __future__ import annotations

from shardproof.config.imported.draft import Draft, Foreign, Same, copy
from shardproof.config.imported.shared_settings import as_policy, measure_from_engine, whole

_NAMES = {"grpo": "grpo", "gae": "ppo", "rloo": "rloo", "reinforce++": "reinforce_pp"}
_AGGREGATIONS = {
    "token_mean": "token_mean",
    "sequence_mean": "sequence_mean",
    "seq_mean_token_sum_norm": "constant",
}
_LOSSES = {
    "regular": {},
    "dual_clip": {},
    "gspo": {"ratio": "sequence"},
    "sapo": {"surrogate": "sapo"},
    "cispo": {"surrogate": "cispo"},
    "clip_cov": {"surrogate": "clip_cov"},
    "kl_cov": {"surrogate": "kl_cov"},
    "dppo": {"surrogate": "dppo_tv"},
}
_ALGORITHM = "trainer.algorithm"
# Of the critic's optimizer, with SkyRL's own values.
_LIKE_THE_POLICY = {
    "optimizer_config.adam_betas": [0.9, 0.999],
    "optimizer_config.weight_decay": 0.01,
    "optimizer_config.max_grad_norm": 1.0,
    "optimizer_config.num_warmup_steps": 0,
    "optimizer_config.scheduler": "constant_with_warmup",
}
_CLIP = (
    Same(f"{_ALGORITHM}.eps_clip_low", "algorithm.clip_low", 0.2, float),
    Same(f"{_ALGORITHM}.eps_clip_high", "algorithm.clip_high", 0.2, float),
)


def _divergence_of_dppo(kind: str) -> str:
    return kind.replace("binary", "dppo")


# The settings of each loss; a loss without any has the clip.
_OF_LOSSES = {
    "cispo": (
        Same(f"{_ALGORITHM}.cispo.cispo_eps_clip_low", "algorithm.clip_low", 1.0, float),
        Same(f"{_ALGORITHM}.cispo.cispo_eps_clip_high", "algorithm.clip_high", 4.0, float),
    ),
    "sapo": (
        Same(f"{_ALGORITHM}.sapo.tau_pos", "algorithm.sapo_temperature_pos", 1.0, float),
        Same(f"{_ALGORITHM}.sapo.tau_neg", "algorithm.sapo_temperature_neg", 1.05, float),
    ),
    "clip_cov": (*_CLIP, Same(f"{_ALGORITHM}.clip_cov.clip_ratio", "algorithm.cov_ratio", 2e-4, float)),
    "kl_cov": (
        Same(f"{_ALGORITHM}.kl_cov.kl_cov_frac", "algorithm.cov_ratio", 0.2, float),
        Same(f"{_ALGORITHM}.kl_cov.ppo_kl_coef", "algorithm.cov_kl_coef", 1.0, float),
    ),
    "dppo": (
        Same(f"{_ALGORITHM}.dppo.dppo_type", "algorithm.surrogate", "binary_tv", _divergence_of_dppo),
        Same(f"{_ALGORITHM}.dppo.delta_low", "algorithm.clip_low", 0.2, float),
        Same(f"{_ALGORITHM}.dppo.delta_high", "algorithm.clip_high", 0.2, float),
    ),
}


def objective(draft: Draft, foreign: Foreign) -> None:
    """The algorithm and all that its loss is made of."""
    _advantages(draft, foreign)
    _loss(draft, foreign)
    _updates(draft, foreign)
    _correction(draft, foreign)
    _selection(draft, foreign)
    _divergence(draft, foreign)


def _advantages(draft: Draft, foreign: Foreign) -> None:
    estimator = foreign.take(f"{_ALGORITHM}.advantage_estimator", "grpo")
    draft.put("algorithm.name", _NAMES.get(estimator, "grpo"), f"{_ALGORITHM}.advantage_estimator")
    if estimator not in _NAMES:
        draft.gaps[f"{_ALGORITHM}.advantage_estimator={estimator!r}"] = "GRPO's advantages are used"
    if draft.values["algorithm.name"] == "grpo":
        scaled = foreign.take(f"{_ALGORITHM}.grpo_norm_by_std", True)
        draft.put("algorithm.scale", "sample" if scaled else "off", f"{_ALGORITHM}.grpo_norm_by_std")
        if scaled:
            draft.put("algorithm.scale_eps", 1e-6, "SkyRL's")
    foreign.take(f"{_ALGORITHM}.grpo_norm_by_std")
    if foreign.take(f"{_ALGORITHM}.advantage_batch_normalize", False):
        _over_the_batch(draft, f"{_ALGORITHM}.advantage_batch_normalize")
    if draft.values["algorithm.name"] in ("ppo", "reinforce_pp"):
        copy(draft, foreign, [Same(f"{_ALGORITHM}.gamma", "algorithm.gamma", 1.0, float)])
    draft.skip(foreign, f"{_ALGORITHM}.gamma", "the algorithm discounts nothing")
    if estimator == "gae":
        _critic(draft, foreign)
    else:
        draft.skip(foreign, "trainer.critic.*", "the algorithm has no critic")
    for key in ("lambd", "value_clip", "value_head_prefix", "normalize_reward"):
        foreign.take(f"{_ALGORITHM}.{key}")


def _over_the_batch(draft: Draft, key: str) -> None:
    """Advantages that are normalised over the tokens of the batch, whatever their algorithm divided them by before."""
    if draft.values.get("algorithm.scale") == "sample":
        draft.gaps[f"{key}=True"] = (
            "advantages are divided by the batch's deviation alone, not by their group's first"
        )
    for name, value in (("scale", "population"), ("scale_over", "tokens"), ("scale_eps", 1e-8)):
        draft.put(f"algorithm.{name}", value, key)


def _critic(draft: Draft, foreign: Foreign) -> None:
    table = (
        Same(f"{_ALGORITHM}.lambd", "algorithm.gae_lambda", 1.0, float),
        Same(f"{_ALGORITHM}.value_clip", "algorithm.value_clip", 0.2, float),
        Same("trainer.critic.model.path", "critic.path"),
        Same("trainer.critic.optimizer_config.lr", "critic.lr", 5e-6, float),
    )
    copy(draft, foreign, table)
    adapters(draft, foreign, "trainer.critic.model.lora", "critic.lora")
    as_policy(draft, foreign, "trainer.critic", "trainer.policy", _LIKE_THE_POLICY)
    mini = foreign.take("trainer.policy_mini_batch_size", 256)
    why = "the critic is updated as often as the policy"
    draft.lack(foreign, "trainer.critic_mini_batch_size", why, unless=(mini,))


def adapters(draft: Draft, foreign: Foreign, theirs: str, ours: str) -> None:
    """The adapters of a model, if it has a rank."""
    rank = foreign.take(f"{theirs}.rank", 0)
    if not rank:
        draft.skip(foreign, f"{theirs}.*", "the model has no adapters")
        return
    draft.put(f"{ours}.r", int(rank), f"{theirs}.rank")
    draft.put(f"{ours}.alpha", int(foreign.take(f"{theirs}.alpha", 16)), f"{theirs}.alpha")
    modules = foreign.either(f"{theirs}.target_modules", "trainer.target_modules")
    draft.put(f"{ours}.target_modules", foreign.take(modules, "all-linear"), modules)
    draft.lack(foreign, f"{theirs}.dropout", "adapters have no dropout", unless=(0, 0.0))
    draft.lack(foreign, f"{theirs}.init_method", "adapters begin as peft's do", unless=("kaiming",))


def _loss(draft: Draft, foreign: Foreign) -> None:
    before = foreign.take(f"{_ALGORITHM}.ppo_loss_type", "regular")
    loss = foreign.take(f"{_ALGORITHM}.policy_loss_type", before)
    for key, value in _LOSSES.get(loss, {}).items():
        draft.put(f"algorithm.{key}", value, f"{_ALGORITHM}.policy_loss_type")
    if loss not in _LOSSES:
        draft.gaps[f"{_ALGORITHM}.policy_loss_type={loss!r}"] = "the clipped objective is used"
    copy(draft, foreign, _OF_LOSSES.get(loss, _CLIP))
    if loss == "clip_cov":
        root = f"{_ALGORITHM}.clip_cov"
        bounds = [
            float(foreign.take(f"{root}.clip_cov_lb", 1.0)),
            float(foreign.take(f"{root}.clip_cov_ub", 5.0)),
        ]
        draft.put("algorithm.cov_bounds", bounds, f"{root}.clip_cov_lb, clip_cov_ub")
    for other in {"cispo", "sapo", "clip_cov", "kl_cov", "dppo"} - {loss}:
        draft.skip(foreign, f"{_ALGORITHM}.{other}.*", f"the loss is {loss!r}")
    for row in _CLIP:
        foreign.take(row.theirs)
    bound = float(foreign.take(f"{_ALGORITHM}.clip_ratio_c", 3.0))
    if loss in ("regular", "dual_clip"):
        dual = bound if loss == "dual_clip" else 0.0
        draft.put("algorithm.dual_clip", dual, f"{_ALGORITHM}.policy_loss_type, clip_ratio_c")
    how = foreign.take(f"{_ALGORITHM}.loss_reduction", "token_mean")
    draft.put("algorithm.aggregation", _AGGREGATIONS.get(how, "token_mean"), f"{_ALGORITHM}.loss_reduction")
    if how not in _AGGREGATIONS:
        draft.gaps[f"{_ALGORITHM}.loss_reduction={how!r}"] = "the mean over all tokens of an update is used"
    length = foreign.take(f"{_ALGORITHM}.max_seq_len")
    if how == "seq_mean_token_sum_norm" and length not in (None, draft.values["rollout.max_new_tokens"]):
        draft.gaps[f"{_ALGORITHM}.max_seq_len={length!r}"] = "sums are divided by rollout.max_new_tokens"


def _updates(draft: Draft, foreign: Foreign) -> None:
    mini = int(foreign.take("trainer.policy_mini_batch_size", 256))
    parts = draft.values["train.prompts_per_step"] / mini
    origin = "trainer.train_batch_size / trainer.policy_mini_batch_size"
    whole(draft, "algorithm.updates_per_epoch", parts, "updates", origin)


def _correction(draft: Draft, foreign: Foreign) -> None:
    """For what engines drew with other probabilities than the trainer's: today's section, and the keys before it."""
    root = f"{_ALGORITHM}.off_policy_correction"
    anchor = f"{_ALGORITHM}.cispo.cispo_anchor"
    surrogate = draft.values.get("algorithm.surrogate", "")
    if surrogate.startswith("dppo") or (surrogate == "cispo" and foreign.take(anchor) == "rollout"):
        measure_from_engine(draft, f"{_ALGORITHM}.policy_loss_type")
        draft.lack(foreign, f"{root}.tis_ratio_type", "the ratio is the correction")
        return
    kind = foreign.take(f"{root}.tis_ratio_type")
    uses_before = foreign.take(f"{_ALGORITHM}.use_tis", False)
    before = float(foreign.take(f"{_ALGORITHM}.tis_imp_ratio_cap", -1.0))
    if kind is None and uses_before:
        draft.put("algorithm.correction", "tis", f"{_ALGORITHM}.use_tis")
        draft.put("algorithm.tis_cap", before if before > 0 else 2.0, f"{_ALGORITHM}.tis_imp_ratio_cap")
        return
    draft.put("algorithm.correction", "none" if kind is None else "tis", f"{root}.tis_ratio_type")
    low, high = f"{root}.token_mask_is_threshold_low", f"{root}.token_mask_is_threshold_high"
    if kind == "token" and foreign.has(low) and foreign.has(high):
        draft.put("algorithm.correction", "icepop", f"{root}.tis_ratio_type, token_mask_is_threshold_*")
        bounds = [float(foreign.take(low)), float(foreign.take(high))]
        draft.put("algorithm.icepop_bounds", bounds, f"{root}.token_mask_is_threshold_*")
    elif kind is not None:
        cap, own = (f"{root}.token_tis_ratio_clip_high", 2.0)
        if kind == "sequence":
            cap, own = (f"{root}.sequence_tis_ratio_clip_high", 5.0)
            draft.gaps[f"{root}.tis_ratio_type='sequence'"] = "weights are cut off per token"
        draft.put("algorithm.tis_cap", float(foreign.take(cap, own)), cap)
    for name in ("token", "sequence"):
        draft.skip(foreign, f"{root}.{name}_tis_ratio_clip_high", f"tis_ratio_type is {kind!r}")
    if not foreign.has(f"{root}.sequence_mask_metric"):
        for name in ("geo", "product"):
            draft.skip(foreign, f"{root}.{name}_mask_*", "no sequences are masked")


def _selection(draft: Draft, foreign: Foreign) -> None:
    """Which completions are learned from: groups that differ, and lengths."""
    kind = foreign.take(f"{_ALGORITHM}.dynamic_sampling.type")
    if kind == "filter":
        draft.put("algorithm.dynamic_sampling", True, f"{_ALGORITHM}.dynamic_sampling.type")
        key = f"{_ALGORITHM}.dynamic_sampling.max_sample_batches"
        rounds = int(foreign.take(key, 30))
        draft.put("algorithm.dynamic_sampling_rounds", rounds if rounds > 0 else 1024, key)
    elif kind is not None:
        what = "use dynamic_sampling, which replaces prompts by others"
        draft.gaps[f"{_ALGORITHM}.dynamic_sampling.type={kind!r}"] = what
    draft.skip(foreign, f"{_ALGORITHM}.dynamic_sampling.*", f"dynamic_sampling.type is {kind!r}")
    why = "completions of equal rewards stay in the batch, with advantages of 0"
    draft.lack(foreign, f"{_ALGORITHM}.zero_variance_filter", why, unless=(False,))
    foreign.take(f"{_ALGORITHM}.zero_variance_filter_tol")
    masks = foreign.take("generator.apply_overlong_filtering", False)
    draft.put("algorithm.overlong", "mask" if masks else "neither", "generator.apply_overlong_filtering")
    draft.lack(
        foreign,
        "trainer.fully_async.sample_full_batch",
        "see algorithm.dynamic_sampling",
        unless=(False,),
    )
    _overlong(draft, foreign, masks)


def _overlong(draft: Draft, foreign: Foreign, masks: bool) -> None:
    """The length penalty of the DAPO example's trainer, under its names of today and of before."""
    key = foreign.either(f"{_ALGORITHM}.overlong_buffer_len", f"{_ALGORITHM}.overlong_buffer.len")
    buffer = foreign.take(key)
    if buffer is None:
        return
    if masks:
        what = "completions that are cut off count in no loss; a recipe does that, or subtracts reward"
        draft.gaps[f"{key}={buffer!r}"] = what
    else:
        start = draft.values["rollout.max_new_tokens"] - int(buffer)
        draft.put("algorithm.overlong", "penalty", key)
        draft.put("algorithm.overlong_from", start, key)
    factor = key.removesuffix("len") + "penalty_factor"
    draft.lack(foreign, factor, "the penalty grows to 1", unless=(1, 1.0))


def _divergence(draft: Draft, foreign: Foreign) -> None:
    in_reward = foreign.take(f"{_ALGORITHM}.use_kl_in_reward", False)
    in_loss = foreign.take(f"{_ALGORITHM}.use_kl_loss", True)
    k3 = foreign.take(f"{_ALGORITHM}.use_kl_estimator_k3", True)
    kind = foreign.take(f"{_ALGORITHM}.kl_estimator_type", "k3" if k3 else "k1")
    coefficient = float(foreign.take(f"{_ALGORITHM}.kl_loss_coef", 0.001))
    coefficient = coefficient if in_reward or in_loss else 0.0
    draft.put("algorithm.kl_coef", coefficient, f"{_ALGORITHM}.kl_loss_coef")
    if coefficient:
        where = "reward" if in_reward else "loss"
        draft.put("algorithm.kl_in", where, f"{_ALGORITHM}.use_kl_in_reward, use_kl_loss")
        usable = kind in ("k2", "k3") or (kind == "k1" and in_reward)
        draft.put("algorithm.kl_estimator", kind if usable else "k2", f"{_ALGORITHM}.kl_estimator_type")
        if not usable:
            draft.gaps[f"KL estimator {kind!r} in the {where}"] = (
                "k2 is used, whose gradient is that of the KL"
            )
    else:
        draft.values.pop("reference.path", None)
    draft.lack(foreign, f"{_ALGORITHM}.use_abs_kl", "see algorithm.kl_estimator", unless=(False,))
    root = f"{_ALGORITHM}.kl_ctrl"
    if coefficient and in_reward and foreign.take(f"{root}.type", "fixed") == "adaptive":
        draft.put("algorithm.kl_target", float(foreign.take(f"{root}.kl_target", 0.1)), f"{root}.kl_target")
        draft.put("algorithm.kl_horizon", int(foreign.take(f"{root}.horizon", 10000)), f"{root}.horizon")
    draft.skip(foreign, f"{root}.*", "the weight of the KL is fixed, as it is in the loss")
    draft.skip(foreign, f"{_ALGORITHM}.init_kl_coef", "see algorithm.kl_coef")
    key = f"{_ALGORITHM}.entropy_loss_coef"
    if foreign.take(f"{_ALGORITHM}.use_entropy_loss", False):
        draft.put("algorithm.entropy_coef", float(foreign.take(key, 0.01)), key)
    foreign.take(key)
    if foreign.take("trainer.update_ref_every_epoch", False):
        what = "set algorithm.reference_sync_every to the steps of an epoch"
        draft.gaps["trainer.update_ref_every_epoch=True"] = what
