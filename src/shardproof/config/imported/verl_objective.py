"""What verl's configs say about the objective: advantages, loss, KL and corrections."""

from __future__ import annotations

from shardproof.config.imported.draft import Draft, Foreign, Same, copy
from shardproof.config.imported.shared_settings import measure_from_engine, whole
from shardproof.config.imported.verl_rewards import overlong

ACTOR = "actor_rollout_ref.actor"
_NAMES = {
    "gae": "ppo",
    "grpo": "grpo",
    "rloo": "rloo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "remax": "remax",
    "rloo_vectorized": "rloo",
    "grpo_vectorized": "grpo",
    "gdpo": "gdpo",
}
_AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "constant",
}
ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_LOSSES = {
    "gspo": {"ratio": "sequence"},
    "clip_cov": {"surrogate": "clip_cov"},
    "kl_cov": {"surrogate": "kl_cov"},
}
_LOSSES |= {name: {"surrogate": name} for name in ("sapo", "cispo", "geo_mean", "dppo_tv", "dppo_kl")}
_LOSSES |= {"vanilla": {}}
_CLIP = 0.2


def objective(draft: Draft, foreign: Foreign) -> None:
    """The algorithm and all that its loss is made of."""
    _algorithm(draft, foreign)
    _divergence(draft, foreign)
    _correction(draft, foreign)


def _algorithm(draft: Draft, foreign: Foreign) -> None:
    estimator = foreign.take("algorithm.adv_estimator", "gae")
    draft.put("algorithm.name", _NAMES.get(estimator, "grpo"), "algorithm.adv_estimator")
    if estimator == "gdpo":  # over the tokens of the batch, and without a preset of its own
        for key, value in (("scale_over", "tokens"), ("scale_eps", 1e-8)):
            draft.put(f"algorithm.{key}", value, "algorithm.adv_estimator")
        draft.put("reward.normalise", "each", "algorithm.adv_estimator")
    else:
        draft.put("algorithm.preset", "verl", "the config is verl's")
    if estimator not in _NAMES:
        draft.gaps[f"algorithm.adv_estimator={estimator!r}"] = "GRPO's advantages are used"
    mini = int(foreign.take(f"{ACTOR}.ppo_mini_batch_size", 256))
    origin = f"data.train_batch_size / {ACTOR}.ppo_mini_batch_size"
    whole(
        draft, "algorithm.updates_per_epoch", draft.values["train.prompts_per_step"] / mini, "updates", origin
    )
    mode = foreign.take(f"{ACTOR}.loss_agg_mode", "token-mean")
    draft.put("algorithm.aggregation", _AGGREGATIONS.get(mode, "token_mean"), f"{ACTOR}.loss_agg_mode")
    if mode not in _AGGREGATIONS:
        draft.gaps[f"{ACTOR}.loss_agg_mode={mode!r}"] = "the mean over all tokens of an update is used"
    length = foreign.take(f"{ACTOR}.loss_scale_factor")
    if mode == "seq-mean-token-sum-norm" and length not in (None, draft.values["rollout.max_new_tokens"]):
        draft.gaps[f"{ACTOR}.loss_scale_factor={length!r}"] = "sums are divided by rollout.max_new_tokens"
    loss = foreign.take(f"{ACTOR}.policy_loss.loss_mode", "vanilla")
    _clip(draft, foreign, loss)
    for key, value in _LOSSES.get(loss, {}).items():
        draft.put(f"algorithm.{key}", value, f"{ACTOR}.policy_loss.loss_mode")
    if loss == "gspo":
        draft.put("algorithm.dual_clip", 0.0, f"{ACTOR}.policy_loss.loss_mode")
    if loss == "sapo":
        ends = [
            Same(f"{ACTOR}.tau_{end}", f"algorithm.sapo_temperature_{end}", None, float)
            for end in ("pos", "neg")
        ]
        copy(draft, foreign, ends)
    draft.skip(foreign, f"{ACTOR}.tau_*", f"the loss is {loss!r}")
    draft.skip(foreign, f"{ACTOR}.policy_loss.tau_*", "verl reads those of actor")
    if loss in ("gspo", "sapo", "geo_mean"):  # which take this mean whatever the other keys say
        draft.put("algorithm.aggregation", "sequence_mean", f"{ACTOR}.policy_loss.loss_mode")
    if loss not in _LOSSES:
        draft.gaps[f"{ACTOR}.policy_loss.loss_mode={loss!r}"] = "the clipped objective is used"
    _covariance(draft, foreign, loss)
    if estimator == "grpo" and not foreign.take("algorithm.norm_adv_by_std_in_grpo", True):
        draft.put("algorithm.scale", "off", "algorithm.norm_adv_by_std_in_grpo")
    foreign.take("algorithm.norm_adv_by_std_in_grpo")
    if draft.values["algorithm.name"] in ("ppo", "reinforce_pp"):
        copy(draft, foreign, [Same("algorithm.gamma", "algorithm.gamma", 1.0, float)])
    draft.skip(foreign, "algorithm.gamma", "the algorithm discounts nothing")
    _filters(draft, foreign)
    draft.lack(foreign, "algorithm.use_pf_ppo", "every completion counts alike", unless=(False,))
    draft.lack(foreign, f"{ACTOR}.router_replay.mode", "see rollout.replay_experts", unless=("disabled",))
    why = "see algorithm.trust_region='behaviour'"
    draft.lack(foreign, f"{ACTOR}.use_rollout_log_probs", why, unless=(False,))


def _clip(draft: Draft, foreign: Foreign, loss: str) -> None:
    """The bounds of the ratio, which verl reads under the names of both ends: clip_ratio stands for one that is null."""
    both = float(foreign.take(f"{ACTOR}.clip_ratio", _CLIP))
    ends = {end: f"{ACTOR}.clip_ratio_{end}" for end in ("low", "high")}
    own = {end: both if foreign.is_null(key) else _CLIP for end, key in ends.items()}
    if loss not in ("sapo", "kl_cov"):
        for end, key in ends.items():
            bound = float(foreign.take(key, own[end]))
            # A ratio is never below 0.
            draft.put(f"algorithm.clip_{end}", min(bound, 1.0) if end == "low" else bound, key)
        if both != _CLIP and not all(foreign.has(key) or foreign.is_null(key) for key in ends.values()):
            draft.gaps[f"{ACTOR}.clip_ratio={both:g}"] = (
                f"verl reads clip_ratio_low and clip_ratio_high, {_CLIP} where a config is silent; before 0.3 it read this"
            )
    if loss in ("vanilla", "dppo_tv", "dppo_kl"):
        draft.put(
            "algorithm.dual_clip", float(foreign.take(f"{ACTOR}.clip_ratio_c", 3.0)), f"{ACTOR}.clip_ratio_c"
        )
    foreign.take(f"{ACTOR}.clip_ratio_c")
    for key in ends.values():
        foreign.take(key)


def _covariance(draft: Draft, foreign: Foreign, loss: str) -> None:
    root = f"{ACTOR}.policy_loss"

    def number(key: str, own: float) -> float:
        return float(foreign.take(f"{root}.{key}", own))

    if loss == "clip_cov":
        draft.put("algorithm.cov_ratio", number("clip_cov_ratio", 0.0002), root)
        draft.put("algorithm.cov_bounds", [number("clip_cov_lb", 1.0), number("clip_cov_ub", 5.0)], root)
    elif loss == "kl_cov":
        draft.put("algorithm.cov_ratio", number("kl_cov_ratio", 0.0002), root)
        draft.put("algorithm.cov_kl_coef", number("ppo_kl_coef", 0.1), root)
    for key in ("clip_cov_*", "kl_cov_ratio", "ppo_kl_coef"):
        draft.skip(foreign, f"{root}.{key}", f"the loss is {loss!r}")


def _filters(draft: Draft, foreign: Foreign) -> None:
    if foreign.take("algorithm.filter_groups.enable", False):
        draft.put("algorithm.dynamic_sampling", True, "algorithm.filter_groups.enable")
        rounds = int(foreign.take("algorithm.filter_groups.max_num_gen_batches", 0))
        draft.put(
            "algorithm.dynamic_sampling_rounds",
            rounds if rounds > 0 else 1024,
            "algorithm.filter_groups.max_num_gen_batches",
        )
        draft.lack(
            foreign,
            "algorithm.filter_groups.metric",
            "name a reward function in algorithm.dynamic_sampling_on",
            unless=("acc", "score", "seq_reward"),
        )
    draft.skip(foreign, "algorithm.filter_groups.*", "see algorithm.dynamic_sampling_rounds")
    overlong(draft, foreign)


def _divergence(draft: Draft, foreign: Foreign) -> None:
    in_reward = foreign.take("algorithm.use_kl_in_reward", False)
    in_loss = foreign.take(f"{ACTOR}.use_kl_loss", False)
    kind = foreign.take(
        "algorithm.kl_penalty" if in_reward else f"{ACTOR}.kl_loss_type", "kl" if in_reward else "low_var_kl"
    )
    coefficient = (
        foreign.take("algorithm.kl_ctrl.kl_coef", 0.001)
        if in_reward
        else foreign.take(f"{ACTOR}.kl_loss_coef", 0.001)
    )
    (
        foreign.take("algorithm.kl_penalty"),
        foreign.take(f"{ACTOR}.kl_loss_type"),
        foreign.take(f"{ACTOR}.kl_loss_coef"),
    )
    if not in_reward:
        draft.skip(foreign, "algorithm.kl_ctrl.*", "the KL is not in the reward")
    if not (in_reward or in_loss):
        draft.put("algorithm.kl_coef", 0.0, "use_kl_loss, use_kl_in_reward")
        return
    draft.put("algorithm.kl_coef", float(coefficient), "kl_ctrl.kl_coef" if in_reward else "kl_loss_coef")
    draft.put("algorithm.kl_in", "reward" if in_reward else "loss", "use_kl_in_reward, use_kl_loss")
    if ESTIMATORS.get(kind) == "k1" and not in_reward:
        draft.gaps[f"{ACTOR}.kl_loss_type={kind!r}"] = (
            "its expected gradient is zero; k2 is used, which has the KL's"
        )
        draft.put("algorithm.kl_estimator", "k2", "in place of k1")
    elif (
        kind.endswith("+") and not in_reward and kind[:-1] in ESTIMATORS
    ):  # k2's gradient under another's value
        draft.put("algorithm.kl_estimator", "k2", "kl_loss_type")
    elif kind in ESTIMATORS:
        draft.put("algorithm.kl_estimator", ESTIMATORS[kind], "kl_penalty" if in_reward else "kl_loss_type")
    else:
        draft.gaps[f"KL estimator {kind!r}"] = "k3 is used"
        draft.put("algorithm.kl_estimator", "k3", f"in place of {kind}")
    if in_reward and in_loss:
        draft.gaps[f"{ACTOR}.use_kl_loss=True"] = "the KL is subtracted from the reward alone"
    if in_reward and foreign.take("algorithm.kl_ctrl.type", "fixed") == "adaptive":
        draft.put(
            "algorithm.kl_target",
            float(foreign.take("algorithm.kl_ctrl.target_kl", 0.1)),
            "kl_ctrl.target_kl",
        )
        draft.put(
            "algorithm.kl_horizon", int(foreign.take("algorithm.kl_ctrl.horizon", 10000)), "kl_ctrl.horizon"
        )


def _correction(draft: Draft, foreign: Foreign) -> None:
    """Weights of what engines drew with other probabilities, under the names that verl has had for them."""
    root = "algorithm.rollout_correction"
    cap = foreign.take(f"{ACTOR}.tis_imp_ratio_cap", -1)
    kind = foreign.take(f"{root}.rollout_is")
    bounds = str(foreign.take(f"{root}.rollout_is_threshold", cap if cap > 0 else 2.0)).split("_")
    if kind is None and cap <= 0:
        draft.put("algorithm.correction", "none", "verl corrects nothing by default")
    elif len(bounds) == 2:  # as 'lower_upper': outside of them nothing counts
        draft.put("algorithm.correction", "icepop", "rollout_is")
        draft.put("algorithm.icepop_bounds", [float(bound) for bound in bounds], "rollout_is_threshold")
    else:
        draft.put("algorithm.correction", "tis", "rollout_is")
        draft.put("algorithm.tis_cap", float(bounds[0]), "rollout_is_threshold")
    if kind == "sequence":
        draft.gaps[f"{root}.rollout_is='sequence'"] = "weights are those of tokens"
    draft.lack(foreign, f"{root}.rollout_rs", "see algorithm.correction='mis'")
    draft.lack(foreign, f"{root}.rollout_is_batch_normalize", "weights stay what they are", unless=(False,))
    if foreign.take(f"{root}.bypass_mode", False):
        _bypass(draft, foreign, root)
    for key in ("rollout_rs_threshold", "loss_type", "bypass_mode"):
        foreign.take(f"{root}.{key}")
    _correction_before(draft, foreign)


def _correction_before(draft: Draft, foreign: Foreign) -> None:
    """The same under the names of verl 0.6, where a threshold and rollout_is=True turn it on."""
    root = "algorithm.rollout_is"
    if foreign.take(root, False) and foreign.has(f"{root}_threshold"):
        high = float(foreign.take(f"{root}_threshold"))
        if foreign.take(f"{root}_mode", "truncate") == "mask":
            low = float(foreign.take(f"{root}_threshold_lower", 1 / high))
            draft.put("algorithm.correction", "icepop", f"{root}_mode")
            draft.put("algorithm.icepop_bounds", [low, high], f"{root}_threshold, {root}_threshold_lower")
        else:
            draft.put("algorithm.correction", "tis", root)
            draft.put("algorithm.tis_cap", high, f"{root}_threshold")
        draft.lack(foreign, f"{root}_level", "weights are those of tokens", unless=("token",))
        draft.lack(foreign, f"{root}_veto_threshold", "no completion is left out for one of its tokens")
    draft.skip(foreign, f"{root}_*", "no weights count: rollout_is and rollout_is_threshold say so")


def _bypass(draft: Draft, foreign: Foreign, root: str) -> None:
    measure_from_engine(draft, f"{root}.bypass_mode")
    draft.lack(foreign, f"{root}.loss_type", "the clipped objective is used", unless=("ppo_clip",))
