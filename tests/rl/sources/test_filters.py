"""Rows that are left out and why, pass rates, and what is said of the data before a run."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from shardproof.config.load import from_json, load_recipe
from shardproof.errors import ConfigError
from shardproof.rl.checks import check_inputs
from shardproof.rl.sources.pass_rates import key_of, read_rates, write_rates
from shardproof.rl.sources.streams import make_stream
from shardproof.rl.sources.summary import histogram, spread, summarise, token_shower
from tests.rl.chat.templates import make_tokenizer
from tests.rl.runs import TINY, small_recipe, write_rows

SUMS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(1, 5) for b in (1, 22, 333)]


def read(tmp_path, *overrides, rows=SUMS):
    source = write_rows(tmp_path / "sums.jsonl", rows)
    # An override that names the source comes last, and wins.
    recipe = from_json(small_recipe(tmp_path / "run", f"data.train={source}", *overrides))
    return recipe, check_inputs(recipe)


def refused(*args, **kwargs):
    with pytest.raises(ConfigError) as caught:
        read(*args, **kwargs)
    return str(caught.value)


@pytest.mark.parametrize("key", ["data.train", "data.evaluation", "data.pass_rates"])
def test_no_name_is_no_folder(tmp_path, key):
    """Empty text once meant the recipe's own folder, with everything that lies there."""
    assert "'' names no file" in refused(tmp_path, f"{key}=")
    text = TINY.read_text().replace('"tiny/model"', f'"{TINY.parent}/tiny/model"')
    for line in ('train = "tiny/train.jsonl"', 'evaluation = "tiny/evaluation.jsonl"'):
        text = text.replace(line, line.partition("=")[0] + '= ""')
    write_rows(tmp_path / "rows.jsonl", SUMS)
    (tmp_path / "recipe.toml").write_text(text)
    assert load_recipe(tmp_path / "recipe.toml").data.train == ""


def test_long_prompts_are_left_out_and_counted(tmp_path, caplog):
    caplog.set_level("INFO")
    limit = ("data.max_prompt_tokens=5", "data.evaluation=none", "output.eval_every=0")
    assert "4 of 12 rows are too long" in refused(tmp_path, *limit)
    _, inputs = read(tmp_path, *limit, "data.too_long=drop")
    assert [prompt.number for prompt in inputs.prompts] == list(range(8))
    assert inputs.dropped == {"data.train": {"longer than data.max_prompt_tokens=5": 4}}
    assert "data.train: left out 4 of 12 rows: 4 longer than" in caplog.text
    context = (
        "rollout.max_new_tokens=59",
        "data.too_long=drop",
        "data.evaluation=none",
        "output.eval_every=0",
    )
    _, inputs = read(tmp_path, *context)
    assert inputs.dropped == {"data.train": {"too long for 64 positions": 4}}
    none = refused(tmp_path, "data.max_prompt_tokens=1", "data.too_long=drop")
    assert "left out 12 of 12 rows" in none and "none is left" in none


def test_room_is_kept_for_what_is_sampled_and_for_nothing_else(tmp_path):
    row = {"prompt": "1+" * 25 + "1=", "completion": "26", "answer": "26"}  # 52 tokens of 64
    sampled = ("rollout.max_new_tokens=20", "data.evaluation=none", "output.eval_every=0")
    assert "rollout.max_new_tokens=20 does not fit" in refused(tmp_path, *sampled, rows=[row])
    # Rows that are imitated are not sampled; held-out ones are, where a reward scores them.
    recipe, inputs = read(tmp_path, *sampled, "algorithm.name=sft", rows=[row])
    assert len(inputs.prompts) == 1
    facts = summarise(recipe, inputs, "train", 1)
    assert facts["sets"]["train"]["longest"] == 55 and not facts["samples"]
    held_out = write_rows(tmp_path / "held_out.jsonl", [row])
    both = (sampled[0], "algorithm.name=sft", f"data.evaluation={held_out}")
    assert "rollout.max_new_tokens=20 does not fit" in refused(tmp_path, *both, rows=[row])
    # What a teacher reads is sampled, also where nothing is rewarded.
    teacher = ("algorithm.name=distillation", f"teacher.path={TINY.parent}/tiny/teacher", "reward=none")
    assert "rollout.max_new_tokens=20 does not fit" in refused(tmp_path, *sampled, *teacher, rows=[row])


@pytest.mark.parametrize("answer", [None, "", "  "])
def test_rows_without_an_answer_are_left_out_and_counted(tmp_path, answer):
    rows = [*SUMS[:3], {"prompt": "1+1=", "answer": answer}, {"prompt": "1+2="}]
    assert "has no column 'answer'" in refused(tmp_path, rows=rows) or "answer" in refused(
        tmp_path, rows=rows
    )
    _, inputs = read(tmp_path, "data.no_answer=drop", rows=rows)
    assert (len(inputs.prompts), inputs.dropped) == (3, {"data.train": {"without an answer": 2}})
    assert "holds no rows but 2 without an answer" in refused(tmp_path, "data.no_answer=drop", rows=rows[3:])


def test_prompts_are_chosen_by_their_pass_rates(tmp_path):
    _, inputs = read(tmp_path)
    path = tmp_path / "rates.jsonl"
    write_rates(path, inputs.prompts, {n: (n % 5, 4) for n in range(12)})
    between = (f"data.pass_rates={path}", "data.pass_rate_between=[0.25, 0.75]")
    _, chosen = read(tmp_path, *between)
    assert [prompt.text for prompt in chosen.prompts] == [
        p.text for n, p in enumerate(inputs.prompts) if n % 5 in (1, 2, 3)
    ]
    assert chosen.dropped == {"data.train": {"with a pass rate outside 0.25 to 0.75": 5}}
    # The order of the rows, and where they lie, does not matter.
    _, other = read(tmp_path, *between, rows=SUMS[::-1])
    assert {p.text for p in other.prompts} == {p.text for p in chosen.prompts}
    more = [*SUMS, {"prompt": "9+9=", "answer": "18"}]
    assert "lacks 1 of 13 prompts" in refused(tmp_path, *between, rows=more)
    assert "knows none of the 1 prompts" in refused(tmp_path, *between, rows=more[-1:])
    assert "no prompt has a pass rate from 0.9 to 0.95" in refused(
        tmp_path, between[0], "data.pass_rate_between=[0.9, 0.95]"
    )
    recipe, known = read(tmp_path, between[0], "data.curriculum.easy=0", "data.curriculum.hard=0", rows=more)
    assert list(known.rates) == [n % 5 / 4 for n in range(12)] + [None]
    drawn = make_stream(recipe, known.prompts, known.sources, known.rates).take(7)
    assert {n % 5 in (1, 2, 3) or n == 12 for n in drawn} == {True}


def test_rows_that_nothing_judged_are_left_out_instead_of_asked_for_again(tmp_path):
    data = write_rows(
        tmp_path / "rows.jsonl", [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(3)]
    )
    settings = (f"data.train={data}", "data.evaluation=none", "output.eval_every=0")
    path = tmp_path / "rates.jsonl"
    write_rates(path, check_inputs(load_recipe(TINY, settings)).prompts, {0: (1, 4), 1: (0, 0), 2: (2, 4)})
    between = (*settings, f"data.pass_rates={path}", "data.pass_rate_between=[0.1, 0.9]")
    found = check_inputs(load_recipe(TINY, between))
    assert [prompt.text for prompt in found.prompts] == ["0+1=", "2+1="]
    assert found.dropped == {"data.train": {"that nothing judged when pass rates were measured": 1}}
    known = check_inputs(load_recipe(TINY, between[:-1]))
    assert list(known.rates) == [0.25, None, 0.5]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"key": "a"}, "rates.jsonl:2 is not a pass rate"),
        ({"key": "a", "pass_rate": 1.5}, "the pass rate 1.5 is not between"),
        ({"key": "a", "pass_rate": 10**400}, "is not between"),
        ({"key": "a", "pass_rate": 0.5, "samples": "8"}, "rates.jsonl:2: 'samples' is no number"),
        ({"key": "a", "pass_rate": 0.5, "samples": 10**400}, "rates.jsonl:2: 'samples' is no number"),
    ],
)
def test_a_file_that_holds_no_pass_rates_is_refused_by_line(tmp_path, line, said):
    path = write_rows(tmp_path / "rates.jsonl", [{"key": "b", "pass_rate": 1}, line])
    with pytest.raises(ConfigError, match=said):
        read_rates(str(path))


def test_rows_that_are_alike_share_the_pass_rate_of_all_their_samples(tmp_path):
    """Only the last line of a prompt was read, so that the same prompt could be easy or hard by chance."""
    _, inputs = read(tmp_path, rows=[*SUMS[:2], SUMS[0], SUMS[0], SUMS[1]])
    path = tmp_path / "rates.jsonl"
    write_rates(path, inputs.prompts, {0: (4, 4), 1: (0, 0), 2: (0, 0), 3: (2, 8), 4: (0, 0)})
    assert read_rates(str(path)) == {key_of(inputs.prompts[0]): 0.5, key_of(inputs.prompts[1]): None}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ('answer_column = "none"', "would mean that of all"),
        ('answer_column = ""', "has no column '' (data.answer_column)"),
        ('prompt_column = ""', "has no column '' (data.prompt_column)"),
        ('name = "a\\nb"', "which metrics cannot show"),
        ('name = "\\u202e"', "which metrics cannot show"),
    ],
)
def test_what_a_source_says_of_itself_is_not_passed_over(tmp_path, changes, said):
    assert said in refused(tmp_path, f'data.train=[{{source = "{tmp_path}/sums.jsonl", {changes}}}]')


def test_weights_without_rows_take_no_part(tmp_path):
    write_rows(tmp_path / "long.jsonl", [{"prompt": "1234+1234=", "answer": "2468"}])
    sources = [{"source": str(tmp_path / name), "weight": 1.0} for name in ("sums.jsonl", "long.jsonl")]
    tables = ", ".join(f'{{source = "{each["source"]}", weight = 1.0}}' for each in sources)
    recipe, inputs = read(
        tmp_path, f"data.train=[{tables}]", "data.too_long=drop", "data.max_prompt_tokens=6"
    )
    assert inputs.sources == {"sums": 12} and len(inputs.prompts) == 12
    assert sorted(make_stream(recipe, inputs.prompts, inputs.sources).take(12)) == list(range(12))


def test_a_rows_own_sampling_is_read_where_the_recipe_allows_it(tmp_path):
    rows = [SUMS[0], {**SUMS[1], "sampling": {"top_k": 3}}, {**SUMS[2], "sampling": None}]
    _, inputs = read(tmp_path, rows=rows)
    assert [prompt.sampling for prompt in inputs.prompts] == [None, None, None]
    _, inputs = read(tmp_path, 'rollout.row_overrides=["top_k"]', rows=rows)
    assert [prompt.sampling for prompt in inputs.prompts] == [None, {"top_k": 3}, None]
    said = refused(tmp_path, 'rollout.row_overrides=["min_p"]', rows=rows)
    assert "sums.jsonl:2: column 'sampling': 'top_k' is not in rollout.row_overrides" in said
    # What may follow is shown as it is checked.
    most = ("rollout.max_new_tokens=62", "data.evaluation=none", "output.eval_every=0")
    own = [{**SUMS[0], "sampling": {"max_new_tokens": 3}}]
    recipe, inputs = read(tmp_path, *most, "rollout.row_overrides=['max_new_tokens']", rows=own)
    assert summarise(recipe, inputs, "train", 0)["sets"]["train"]["longest"] == 7


def test_lengths_in_numbers():
    assert spread([3]) == {"min": 3, "median": 3, "p95": 3, "max": 3}
    assert spread(range(1, 101)) == {"min": 1, "median": 50.5, "p95": 95, "max": 100}
    assert histogram([4, 4, 5, 6]) == [{"from": n, "to": n, "rows": r} for n, r in ((4, 2), (5, 1), (6, 1))]
    bins = histogram([1, 100, 100, 57])
    assert len(bins) <= 8 and sum(each["rows"] for each in bins) == 4
    assert (bins[0]["from"], bins[-1]["to"]) == (1, 100)


def test_the_summary_names_duplicates_and_prompts_that_are_in_both_sets(tmp_path):
    held_out = write_rows(tmp_path / "held_out.jsonl", [SUMS[0], {"prompt": "7+7=", "answer": "14"}])
    recipe, inputs = read(tmp_path, f"data.evaluation={held_out}", rows=[*SUMS, SUMS[3]])
    facts = json.loads(json.dumps(summarise(recipe, inputs, "train", 2)))
    assert facts["sets"]["train"]["duplicates"] == 1 and facts["sets"]["evaluation"]["duplicates"] == 0
    assert facts["shared"] == [{"set": "evaluation", "rows": 1, "examples": ["1+1="]}]
    assert facts["stop_tokens"] == [{"id": 1, "text": "<eos>", "special": True}]
    assert [row["row"] for row in facts["shown"]] == make_stream(recipe, inputs.prompts, inputs.sources).take(
        2
    )
    (sequence,) = facts["shown"][0]["sequences"]
    assert "".join(token["text"] for token in sequence["tokens"]) == facts["shown"][0]["text"]
    assert not any(token["trained"] for token in sequence["tokens"])
    assert facts["sets"]["train"]["longest"] == 6 + recipe.rollout.max_new_tokens


def test_a_part_of_a_letter_is_shown_by_its_bytes():
    tokenizer = make_tokenizer("{{ messages }}")
    show = token_shower(tokenizer)
    tokens = tokenizer("aé 日", add_special_tokens=False)["input_ids"]
    found = "".join(show(token)["text"] for token in tokens)
    assert found == "a<C3><A9> <E6><97><A5>"
    assert show(tokenizer.convert_tokens_to_ids("<|im_end|>"))["special"]


def test_spaces_and_bytes_of_sentencepiece_tokens_are_shown():
    """Their decoders take a space from the beginning of each text: "1 + 1" looked like "1+1"."""
    words = ["<unk>", "<s>", "<0xC3>", "<0xA9>", *("\u2581", "\u2581\u2581", "\u25811", "1", "+", "x")]
    merges = [("\u2581", "1"), ("\u2581", "\u2581")]
    model = models.BPE(
        {word: n for n, word in enumerate(words)}, merges, byte_fallback=True, unk_token="<unk>"
    )
    made = Tokenizer(model)
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    parts = (
        decoders.Replace("\u2581", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    )
    made.decoder = decoders.Sequence(list(parts))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", unk_token="<unk>")
    show = token_shower(tokenizer)
    shown = [show(token)["text"] for token in tokenizer("1 + 1+1  xé")["input_ids"]]
    assert shown == [" 1", " ", "+", " 1", "+", "1", "  ", "x", "<C3>", "<A9>"]
    assert show(1) == {"id": 1, "text": "<s>", "special": True}


def test_keys_of_prompts_tell_answers_apart(tmp_path):
    _, inputs = read(tmp_path, rows=[SUMS[0], {**SUMS[0], "answer": "3"}, {**SUMS[0], "other": 1}])
    keys = [key_of(prompt) for prompt in inputs.prompts]
    assert keys[0] == keys[2] != keys[1]


def test_rows_keep_their_pass_rates_in_a_table(tmp_path):
    """Every cell is text there: a measured number was another answer, and the prompt was not known."""
    rows = [
        {"prompt": "1+1=", "answer": 2},
        {"prompt": "1+2=", "answer": 3.5},
        {"prompt": "2+2=", "answer": "4"},
    ]
    _, inputs = read(tmp_path, rows=rows)
    table = tmp_path / "rows.csv"
    table.write_text("prompt,answer\n1+1=,2\n1+2=,3.5\n2+2=,4\n")
    _, moved = read(tmp_path, f"data.train={table}")
    assert [key_of(each) for each in moved.prompts] == [key_of(each) for each in inputs.prompts]


def test_paths_of_lists_are_found_beside_the_recipe(tmp_path):
    (tmp_path / "rows").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        write_rows(tmp_path / "rows" / name, SUMS)
    text = TINY.read_text().replace('"tiny/', f'"{TINY.parent}/tiny/')
    text = text.replace(
        f'train = "{TINY.parent}/tiny/train.jsonl"', 'train = ["rows/a.jsonl", "rows/b*.jsonl", "rows"]'
    )
    (tmp_path / "recipe.toml").write_text(text)
    recipe = load_recipe(tmp_path / "recipe.toml")
    assert [each.source for each in recipe.data.sources] == [
        f"{tmp_path}/rows/a.jsonl",
        f"{tmp_path}/rows/b*.jsonl",
        f"{tmp_path}/rows",
    ]
    assert [each.name for each in recipe.data.sources] == ["a", "b*", "rows"]
    assert len(check_inputs(recipe).prompts) == 48
    table = '{ source = "rows/a.jsonl" }'  # a single one is a list of one
    (tmp_path / "recipe.toml").write_text(text.replace('["rows/a.jsonl", "rows/b*.jsonl", "rows"]', table))
    assert [each.source for each in load_recipe(tmp_path / "recipe.toml").data.sources] == [
        f"{tmp_path}/rows/a.jsonl"
    ]
