"""What presets and switches stand for, in float64 and completion by completion; those that failed count in nothing."""

from __future__ import annotations

import statistics

import numpy as np
import torch

from tests.rl.parity.cases import MAX_NEW_TOKENS


def deviation(kind, values):
    return (statistics.stdev if kind == "sample" else statistics.pstdev)(values)


def expected_advantages(drawn, s):
    """Of each completion's tokens, by the settings `s` of its algorithm."""
    lengths, n = drawn.lengths, len(drawn.groups)
    known = [i for i in range(n) if drawn.rewards[i] is not None]
    kl = [s.kl_coef * (old - ref).double() for old, ref in zip(drawn.old, drawn.ref, strict=True)]
    in_reward = s.kl_coef and s.kl_in == "reward"
    penalties = [row.tolist() if in_reward else [0.0] * len(row) for row in kl]
    rewards = [[-x for x in row] for row in penalties]
    for row, reward in zip(rewards, drawn.rewards, strict=True):
        row[-1] += reward or 0.0
    totals = [sum(row) for row in rewards]
    if s.baseline in ("mean", "leave_one_out"):
        rows = [[0.0] * length for length in lengths]
        for i in known:
            mine = [j for j in known if s.compared_over == "batch" or drawn.groups[j] == drawn.groups[i]]
            others = [totals[j] for j in mine if s.baseline == "mean" or j != i]
            group = [totals[j] for j in known if drawn.groups[j] == drawn.groups[i]]
            divisor = {
                "group": lambda group=group: deviation(s.scale, group) + s.scale_eps,
                "batch": lambda: deviation(s.scale, [totals[j] for j in known]) + s.scale_eps,
            }.get(s.scale_over if s.scale != "off" else "", lambda: 1.0)()
            rows[i] = [(totals[i] - statistics.fmean(others)) / divisor] * lengths[i]
    else:
        rows = []
        for i in range(n):
            row, following, value_after = [], 0.0, 0.0
            for reward, v in zip(reversed(rewards[i]), reversed(drawn.values[i].tolist()), strict=True):
                if s.baseline == "critic":
                    following = reward + s.gamma * value_after - v + s.gamma * s.gae_lambda * following
                else:
                    following = reward + s.gamma * following
                value_after = v
                row.append(following - (drawn.greedy[i] if s.baseline == "greedy" else 0.0))
            rows.append(row[::-1])
    if s.scale != "off" and s.scale_over == "tokens":
        every = [a for i in known for a in rows[i]]
        mean, divisor = statistics.fmean(every), deviation(s.scale, every) + s.scale_eps
        rows = [[(a - mean) / divisor for a in row] for row in rows]
    return [row if i in known else [0.0] * len(row) for i, row in enumerate(rows)]


def covariances(drawn, advantages, logps):
    """Of all tokens in one row, with means over those that count; nothing of the others."""
    a, x = (
        np.concatenate([np.asarray(row, dtype=np.float64) for row in rows]) for rows in (advantages, logps)
    )
    known = np.repeat([reward is not None for reward in drawn.rewards], drawn.lengths)
    return np.where(known, (a - a[known].mean()) * (x - x[known].mean()), -np.inf), int(known.sum())


def expected_chosen(drawn, s, advantages, logps):
    """The tokens that KL-Cov holds back: those of the largest covariance over the whole batch."""
    covariance, number = covariances(drawn, advantages, logps)
    chosen = np.zeros(len(covariance))
    chosen[np.argsort(-covariance)[: max(int(s.cov_ratio * number), 1)]] = 1.0
    return np.split(chosen, np.cumsum(drawn.lengths)[:-1])


def may_be_chosen(drawn, s, advantages, logps):
    """The tokens that Clip-Cov draws from: all of them are left out if its share is 1."""
    covariance, _ = covariances(drawn, advantages, logps)
    within = (covariance > s.cov_bounds[0]) & (covariance < s.cov_bounds[1])
    return np.split(within.astype(np.float64), np.cumsum(drawn.lengths)[:-1])


def expected(drawn, s, chosen, leaves):
    """The loss in float64, from the log-probs of each completion's tokens."""
    advantages = expected_advantages(drawn, s)
    low, high, total = s.clip_low, s.clip_high, 0.0
    counted = [i for i, reward in enumerate(drawn.rewards) if reward is not None]
    num_tokens, n = sum(drawn.lengths[i] for i in counted), len(counted)
    for i in counted:
        x = leaves[i]
        a, old = torch.tensor(advantages[i], dtype=torch.float64), drawn.old[i].double()
        d, length = x - old, drawn.lengths[i]
        r = torch.exp({"token": d, "sequence": d.mean(), "product": d.sum()}[s.ratio]).expand(length)
        clipped = torch.maximum(-r * a, -r.clamp(1 - low, 1 + high) * a)
        if s.dual_clip and s.surrogate == "clip":
            clipped = torch.where(a < 0, torch.minimum(clipped, -s.dual_clip * a), clipped)
        t = torch.where(a > 0, s.sapo_temperature_pos, s.sapo_temperature_neg)
        held = torch.tensor(chosen[i])
        nearer = torch.where(a > 0, d.clamp(max=high), torch.where(a < 0, d.clamp(min=-low), d))
        p, q = x.detach().exp(), old.exp()
        coin = q * (q / p).log() + (1 - q) * ((1 - q + 1e-8) / (1 - p + 1e-8)).log()
        moved = {"dppo_kl": coin}.get(s.surrogate, (p - q).abs())
        stays = ~(((a > 0) & (p > q) & (moved > high)) | ((a < 0) & (p < q) & (moved > low)))
        capped = d.detach().exp().clamp(max=s.dual_clip or 1e9)
        w = (x.detach() - old).sum().exp()
        phi = torch.where(
            a < 0,
            w**s.vespo_k_neg * torch.exp(s.vespo_lambda_neg * (1 - w)),
            w**s.vespo_k_pos * torch.exp(s.vespo_lambda_pos * (1 - w)),
        )
        row = {
            "clip": clipped,
            "cispo": -r.detach().clamp(1 - low, 1 + high) * a * x,
            "sapo": -4 / t / (1 + torch.exp(-t * (r - 1))) * a,
            "vespo": -phi * a * x,
            "clip_cov": clipped * (1 - held),
            "kl_cov": -torch.exp(d) * a + s.cov_kl_coef * d.abs() * held,
            "geo_mean": -nearer.mean().exp() * a,
            "dppo_tv": -capped * a * x * stays,
            "dppo_kl": -capped * a * x * stays,
        }[s.surrogate]
        if s.kl_coef and s.kl_in == "loss":
            row = row + s.kl_coef * 0.5 * (x - drawn.ref[i].double()) ** 2
        weight = {
            "token_mean": 1 / num_tokens,
            "sequence_mean": 1 / length / n,
            "sequence_sum": 1 / n,
            "constant": 1 / MAX_NEW_TOKENS / n,
        }[s.aggregation]
        total = total + weight * row.sum()
    return total


def expected_value_loss(drawn, s, leaves):
    """The critic's loss in float64, from its values of each completion's tokens: a mean over tokens."""
    counted = [i for i, reward in enumerate(drawn.rewards) if reward is not None]
    number, total = sum(drawn.lengths[i] for i in counted), 0.0
    for i in counted:
        old, gain, after, returns = drawn.values[i].double(), 0.0, 0.0, []
        for place in reversed(range(drawn.lengths[i])):
            reward = drawn.rewards[i] if place == drawn.lengths[i] - 1 else 0.0
            gain = reward + s.gamma * after - float(old[place]) + s.gamma * s.gae_lambda * gain
            after = float(old[place])
            returns.insert(0, gain + after)
        returns = torch.tensor(returns, dtype=torch.float64)
        near = old + (leaves[i] - old).clamp(-s.value_clip, s.value_clip)
        total = total + 0.5 * torch.maximum((leaves[i] - returns) ** 2, (near - returns) ** 2).sum() / number
    return total
