"""Scores of every family, on every layout, are those of plain transformers with eager attention."""

import functools

import peft
import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

import shardproof as sp
from shardproof.model import head
from shardproof.train.state import training_state
from tests.models import EXTRA_FAMILIES, FAMILIES, make_checkpoint
from tests.ranks import run_ranks, run_ranks_outcomes
from tests.shard.test_bad_checkpoints import assert_all_raise
from tests.shard.test_serve import full_state

pytestmark = [pytest.mark.distributed, pytest.mark.invariant]

TOLERANCE = 2e-5
TEMPERATURE = 0.7
UNPACKED = {"phi3": "its rotary embedding depends on the longest position in the batch"}
# Longer than the sliding windows, of odd number, and such that no border falls on a rank's.
LENGTHS = (19, 2, 33, 7, 12)
SEQUENCES = [[(11 * i + 5 * j * j + 3) % 101 for j in range(n)] for i, n in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A function from a family, and config fields, to the folder of its checkpoint; each is made once."""

    @functools.cache
    def make(family, **fields):
        return make_checkpoint(tmp_path_factory.mktemp(family), family, **fields)

    return make


@functools.cache
def truth(folder, temperature=1.0):
    """[(log-probs, entropy)] of each sequence alone, by the model itself with eager attention."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    return plain_scores(model, temperature)


def plain_scores(model, temperature=1.0):
    scores = []
    with torch.no_grad():
        for tokens in SEQUENCES:
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0, :-1].float() / temperature
            every = torch.log_softmax(logits, -1)
            logp = every.gather(1, torch.tensor(tokens[1:])[:, None]).squeeze(1)
            scores.append((logp, -(every.exp() * every).sum(-1)))
    return scores


def my_indices(sequence_parallel=1):
    num_groups = dist.get_world_size() // sequence_parallel
    return list(range(len(SEQUENCES)))[dist.get_rank() // sequence_parallel :: num_groups]


def load(folder, **options):
    return sp.load(folder, compute_dtype=torch.float32, progress=False, **options)


def score_on_rank(folder, options, temperatures, chunk_elements=None):
    """How the model is scored, and {(temperature, index): (log-probs, entropy)} of this rank's sequences."""
    with pytest.MonkeyPatch.context() as patch:
        if chunk_elements is not None:
            patch.setattr(head, "_CHUNK_ELEMENTS", chunk_elements)
        policy = load(folder, **options)
        mine = my_indices(policy.sequence_parallel)
        found = {}
        for temperature in temperatures:
            scores = sp.logprobs(policy, [SEQUENCES[i] for i in mine], temperature=temperature, entropy=True)
            found.update(
                {(temperature, i): pair for i, pair in zip(mine, zip(*scores, strict=True), strict=True)}
            )
    return training_state(policy).scoring, found


def assert_scores(ranks, expected):
    """Each rank's scores are `expected[temperature][index]`, and all sequences are scored."""
    for _, found in ranks:
        for (temperature, index), scores in found.items():
            torch.testing.assert_close(scores, expected[temperature][index], rtol=0, atol=TOLERANCE)
    keys = {key for _, found in ranks for key in found}
    assert keys == {(t, i) for t in expected for i in range(len(SEQUENCES))}


# Families.


@pytest.mark.parametrize(("num_ranks", "strategy"), [(1, "fsdp2"), (2, "fsdp1")])
@pytest.mark.parametrize("family", FAMILIES + EXTRA_FAMILIES)
def test_family(checkpoint, family, num_ranks, strategy):
    folder = checkpoint(family)
    temperatures = (1.0, TEMPERATURE)
    ranks = run_ranks(num_ranks, score_on_rank, folder, {"strategy": strategy}, temperatures)
    assert_scores(ranks, {t: truth(folder, t) for t in temperatures})
    for scoring, _ in ranks:
        assert scoring == ranks[0][0]
        assert scoring.packed == (family not in UNPACKED)
        assert scoring.chunked
        assert scoring.reason == UNPACKED.get(family, "packed sequences")


@pytest.mark.parametrize(
    ("family", "strategy"),
    [(family, "fsdp2") for family in FAMILIES + EXTRA_FAMILIES if family not in UNPACKED]
    + [(family, "fsdp1") for family in ("llama_tied", "gpt2", "gpt_oss", "deepseek_v3", "gemma2")],
)
def test_family_with_sequence_parallelism(checkpoint, family, strategy):
    folder = checkpoint(family)
    options = {"strategy": strategy, "sequence_parallel": 2}
    ranks = run_ranks(2, score_on_rank, folder, options, (TEMPERATURE,))
    assert_scores(ranks, {TEMPERATURE: truth(folder, TEMPERATURE)})
    for key, scores in ranks[0][1].items():
        assert torch.equal(scores[0], ranks[1][1][key][0])


def test_phi3_cannot_be_split(checkpoint):
    outcomes = run_ranks_outcomes(2, score_on_rank, checkpoint("phi3"), {"sequence_parallel": 2}, (1.0,))
    assert_all_raise(outcomes, "C001", "sequence_parallel=2", "'phi3'", UNPACKED["phi3"], kind="ConfigError")


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize(("family", "kv_heads"), [("qwen3", 1), ("qwen3", 2), ("gpt_oss", 2), ("gemma2", 1)])
def test_fewer_key_value_heads_than_ranks(checkpoint, family, kv_heads, strategy):
    folder = checkpoint(family, num_key_value_heads=kv_heads)
    options = {"strategy": strategy, "sequence_parallel": 4}
    ranks = run_ranks(4, score_on_rank, folder, options, (1.0,))
    assert_scores(ranks, {1.0: truth(folder)})


@pytest.mark.parametrize("lengths", [(40,), (3, 3, 3), (2,), (9, 30, 2)], ids=str)
def test_sequences_that_cross_the_borders_of_ranks(checkpoint, lengths):
    """One long sequence over four ranks; borders inside each; fewer tokens than ranks."""
    folder = checkpoint("qwen3")
    sequences = [[(7 * i + 3 * j) % 101 for j in range(n)] for i, n in enumerate(lengths)]
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    for rows in run_ranks(4, logprobs_on_rank, folder, sequences, {"sequence_parallel": 4}):
        for tokens, row in zip(sequences, rows, strict=True):
            with torch.no_grad():
                every = torch.log_softmax(model(torch.tensor([tokens])).logits[0, :-1].float(), -1)
            expected = every.gather(1, torch.tensor(tokens[1:])[:, None]).squeeze(1)
            torch.testing.assert_close(row, expected, rtol=0, atol=TOLERANCE)


def logprobs_on_rank(folder, sequences, options, **how):
    return sp.logprobs(load(folder, **options), sequences, **how)


@pytest.mark.parametrize("micro_batch_tokens", [1, 20, 1000])
def test_the_split_into_micro_batches_does_not_matter(checkpoint, micro_batch_tokens):
    folder = checkpoint("qwen3_moe")
    (rows,) = run_ranks(1, logprobs_of_all, folder, micro_batch_tokens)
    for row, (expected, _) in zip(rows, truth(folder), strict=True):
        torch.testing.assert_close(row, expected, rtol=0, atol=TOLERANCE)


def logprobs_of_all(folder, micro_batch_tokens):
    return logprobs_on_rank(folder, SEQUENCES, {}, micro_batch_tokens=micro_batch_tokens)


def logprobs_of_few(folder, counts):
    """Ranks with different numbers of sequences, and one with none."""
    return logprobs_on_rank(folder, SEQUENCES[: counts[dist.get_rank()]], {}, micro_batch_tokens=20)


def test_a_rank_without_sequences_takes_part(checkpoint):
    folder = checkpoint("llama")
    rows = run_ranks(3, logprobs_of_few, folder, [5, 0, 2])
    assert [len(row) for row in rows] == [5, 0, 2]
    for row in rows:
        for found, (expected, _) in zip(row, truth(folder), strict=False):
            torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


def test_logprobs_carry_no_gradient_and_leave_the_mode(checkpoint):
    assert run_ranks(1, mode_after_scoring, checkpoint("llama")) == [(True, True, False)]


def mode_after_scoring(folder):
    policy = load(folder)
    before = policy.module.training
    (row, *_) = sp.logprobs(policy, SEQUENCES)
    return before, policy.module.training, row.requires_grad


# The head.


@pytest.mark.parametrize("family", ["llama_tied", "gemma2", "cohere", "granitemoe"])
def test_head_in_small_chunks(checkpoint, family):
    folder = checkpoint(family)
    ranks = run_ranks(2, score_on_rank, folder, {}, (TEMPERATURE,), 3 * 101)
    assert_scores(ranks, {TEMPERATURE: truth(folder, TEMPERATURE)})


def lora_config(*targets):
    return peft.LoraConfig(target_modules=list(targets), r=3, init_lora_weights=False)


def score_with_adapters(folder, strategy, targets):
    """(scoring, adapters, log-probs with and without them)."""
    policy = load(folder, strategy=strategy, lora=lora_config(*targets))
    rows = [sp.logprobs(policy, SEQUENCES, adapters=adapters) for adapters in (True, False, True)]
    assert all(torch.equal(a, b) for a, b in zip(rows[0], rows[2], strict=True))
    adapters = {n: v for n, v in full_state(policy).items() if "lora_" in n}
    return training_state(policy).scoring, adapters, rows[0], rows[1]


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("targets", [("q_proj", "down_proj"), ("v_proj", "lm_head")], ids="-".join)
def test_adapters_and_the_base_beneath_them(checkpoint, targets, strategy):
    folder = checkpoint("llama")
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    peft.inject_adapter_in_model(lora_config(*targets), plain)
    for scoring, adapters, with_them, without in run_ranks(2, score_with_adapters, folder, strategy, targets):
        # An adapter on the head is part of it; the chunked head would leave it out.
        assert scoring.chunked == ("lm_head" not in targets)
        assert scoring.packed
        assert not plain.load_state_dict(adapters, strict=False).unexpected_keys
        for row, (expected, _) in zip(with_them, plain_scores(plain.eval()), strict=True):
            torch.testing.assert_close(row, expected, rtol=0, atol=TOLERANCE)
        for row, (expected, _) in zip(without, truth(folder), strict=True):
            torch.testing.assert_close(row, expected, rtol=0, atol=TOLERANCE)
        assert max(float((a - b).abs().max()) for a, b in zip(with_them, without, strict=True)) > 0.01


# Values.


def values_on_rank(folder, options):
    critic = load(folder, role="critic", **options)
    return sp.values(critic, SEQUENCES), full_state(critic)["score.weight"]


@pytest.mark.parametrize(
    "options", [{"strategy": "fsdp1"}, {"strategy": "fsdp2"}, {"sequence_parallel": 2}], ids=str
)
@pytest.mark.parametrize("family", ["llama_tied", "qwen3_moe", "gemma2", "phi3"])
def test_values_of_a_critic(checkpoint, family, options):
    if family == "phi3" and "sequence_parallel" in options:
        options = {}
    folder = checkpoint(family)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    for rows, weight in run_ranks(2, values_on_rank, folder, options):
        assert weight.shape == (1, 32)
        for tokens, row in zip(SEQUENCES, rows, strict=True):
            with torch.no_grad():
                hidden = model.base_model(torch.tensor([tokens]), use_cache=False)[0][0, :-1]
            torch.testing.assert_close(row, hidden @ weight[0], rtol=0, atol=TOLERANCE)
            assert len(row) == 1 or row.std() > 1e-3


def score_as_other_role(folder, role):
    policy = load(folder, role=role)
    return sp.logprobs(policy, SEQUENCES) if role == "critic" else sp.values(policy, SEQUENCES)


@pytest.mark.parametrize(("role", "word"), [("critic", "shardproof.values"), ("reference", "role='critic'")])
def test_a_critic_has_values_and_the_others_log_probs(checkpoint, role, word):
    outcomes = run_ranks_outcomes(2, score_as_other_role, checkpoint("llama"), role)
    assert_all_raise(outcomes, "C001", role, word, kind="ConfigError")


# Families that packed attention cannot serve.


UNSERVED = {
    # attention of their own, not through AttentionInterface
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 128},
    # attention inside chunks of tokens, and a head that is not the model's own last module
    "llama4_text": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "intermediate_size_mlp": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_local_experts": 2,
        "attention_chunk_size": 8,
    },
}


@pytest.fixture(scope="module")
def unserved(tmp_path_factory):
    """{family: folder} of families that must be scored sequence by sequence."""
    folders = {}
    for family, fields in UNSERVED.items():
        folders[family] = tmp_path_factory.mktemp(family)
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, vocab_size=101, pad_token_id=0, **fields)
        AutoModelForCausalLM.from_config(config).save_pretrained(folders[family])
    return folders


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("family", UNSERVED)
def test_family_that_is_scored_sequence_by_sequence(unserved, family, strategy):
    ranks = run_ranks(2, score_on_rank, unserved[family], {"strategy": strategy}, (TEMPERATURE,))
    assert_scores(ranks, {TEMPERATURE: truth(unserved[family], TEMPERATURE)})
    assert not ranks[0][0].packed


@pytest.mark.parametrize("family", ["bloom", "gptj"])
def test_family_whose_attention_cannot_be_split_is_refused(unserved, family):
    """Never silently local: each rank of a group would count the group's gradients once more."""
    outcomes = run_ranks_outcomes(2, score_on_rank, unserved[family], {"sequence_parallel": 2}, (1.0,))
    assert_all_raise(outcomes, "T303", f"'{family}'", "sequence_parallel=1", kind="TrainFault")


# A family with attention and state space.


HYBRID = {
    "vocab_size": 101,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "attn_layer_indices": [1],
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}


def hybrid_config():
    return AutoConfig.for_model("bamba", **HYBRID)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """A checkpoint of bamba: attention in its middle layer, state space in the others."""
    folder = tmp_path_factory.mktemp("bamba")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(hybrid_config()).save_pretrained(folder)
    return folder


def train_hybrid(folder, strategy):
    policy = load(folder, strategy=strategy)
    mine = my_indices()
    before = dict(zip(mine, sp.logprobs(policy, [SEQUENCES[i] for i in mine]), strict=True))
    optimizer = sp.make_optimizer(policy, lr=1e-2, eps=1e-3)
    results = [sp.train_step(policy, sp.Batch([SEQUENCES[i] for i in mine]), optimizer) for _ in range(3)]
    return training_state(policy).scoring, before, results


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_hybrid_family_scores_and_trains_sequence_by_sequence(hybrid, strategy):
    (_, _, expected), *_ = run_ranks(1, train_hybrid, hybrid, "fsdp2")
    for scoring, logps, results in run_ranks(2, train_hybrid, hybrid, strategy):
        assert not scoring.packed
        assert scoring.reason == "its layers carry state from token to token"
        for index, row in logps.items():
            torch.testing.assert_close(row, truth(hybrid)[index][0], rtol=0, atol=TOLERANCE)
        for found, wanted in zip(results, expected, strict=True):
            assert found.loss == pytest.approx(wanted.loss, abs=TOLERANCE)
            assert found.grad_norm == pytest.approx(wanted.grad_norm, abs=TOLERANCE)
    first = sum(float(-row.sum()) for row, _ in truth(hybrid)) / sum(n - 1 for n in LENGTHS)
    assert expected[0].loss == pytest.approx(first, abs=TOLERANCE)
    assert expected[2].loss < expected[0].loss - 0.1


def test_hybrid_family_cannot_be_split(hybrid):
    outcomes = run_ranks_outcomes(2, score_on_rank, hybrid, {"sequence_parallel": 2}, (1.0,))
    assert_all_raise(
        outcomes,
        "C001",
        "sequence_parallel=2",
        "'bamba'",
        "carry state from token to token",
        kind="ConfigError",
    )


def score_random_hybrid(strategy):
    policy = load(sp.RandomInit(hybrid_config()), strategy=strategy)
    return sp.logprobs(policy, SEQUENCES)


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_hybrid_family_with_random_weights(strategy):
    # Its state-space parameters are initialised by copying, which no distribution describes.
    (alone,) = run_ranks(1, score_random_hybrid, "fsdp2")
    for rows in run_ranks(2, score_random_hybrid, strategy):
        torch.testing.assert_close(rows, alone, rtol=0, atol=TOLERANCE)
