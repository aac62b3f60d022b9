"""Runs that sample as their recipes and rows say: what is trained on, what rewards read, and what is refused."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from shardproof.config.load import from_json, load_recipe
from shardproof.config.rollout import SHAPING, Rollout, RowOverride
from shardproof.environments.protocol import Reply
from shardproof.errors import ShardproofError
from shardproof.rl.chat.format import ChatFormat
from shardproof.rl.chat.template import Template
from shardproof.rl.checks import check_inputs
from shardproof.rl.conversations.steps import Start, begin, next_request, take_answer, take_turn
from shardproof.rl.data import Prompt
from shardproof.rl.engines import make_sampling
from shardproof.rl.stop_ids import unheeded_end
from shardproof.rollout.sampling import OVERRIDES, Sampling
from shardproof.rollout.stop_strings import StopStrings
from shardproof.rollout.trajectory import Segment
from tests.ranks import run_ranks
from tests.rl.background_parts import make_rules
from tests.rl.chat import templates
from tests.rl.conversations.kept import recipe_with, run_and_keep
from tests.rl.runs import RECIPES, TINY, lines, small_recipe, write_rows
from tests.rl.test_data import make_tokenizer

ONE_STEP = ("train.steps=1", "train.prompts_per_step=4", "output.eval_every=0", "output.save_model=false")


def prepare(folder) -> str:
    rows = lines(RECIPES / "tiny" / "train.jsonl")[:40]
    own = [{"max_new_tokens": 1}, {"stop": ["1", "2"], "min_new_tokens": 1}, None, {"stop_ids": [3, 4, 5, 6]}]
    return str(
        write_rows(folder / "rows.jsonl", [{**row, "sampling": own[k % 4]} for k, row in enumerate(rows)])
    )


@pytest.mark.distributed
@pytest.mark.parametrize("engine", ["embedded", "sharded"])
def test_a_run_samples_as_its_rows_say(tmp_path, engine):
    data = prepare(tmp_path)
    settings = [
        *ONE_STEP, f"data.train={data}", "rollout.row_overrides=['max_new_tokens','stop','min_new_tokens','stop_ids']",
        "rollout.top_k=9", "rollout.stop=['8']", "rollout.include_stop=false", f"rollout.engine={engine}",
        "train.prompts_per_step=8",
    ]  # fmt: skip
    first, second = run_ranks(2, run_and_keep, small_recipe(tmp_path / "run", *settings))
    metrics = first["metrics"]
    assert metrics["nucleus/mean"] >= 0 and "mismatch/mean" not in metrics
    ended = set()
    for made in first["trajectories"] + second["trajectories"]:
        kind, said, text = made["facts"]["row"] % 4, made["segments"][-1]["tokens"], made["text"]
        string = made["stop_string"]
        ended.add((kind, string))
        assert made["finished"] or len(said) == (1 if kind == 0 else 4)
        assert string in (("", "1", "2") if kind == 1 else ("", "8")) and not (
            string and text.endswith(string)
        )
        if kind == 3:
            assert not set(said[:-1]) & {3, 4, 5, 6} and (made["finished"] or not set(said) & {3, 4, 5, 6})
    assert {(1, "1"), (1, "2")} & ended and any(kind == 3 for kind, _ in ended)
    counted = [sum(mask) for each in (first, second) for mask in each["masks"]]
    lengths = [len(t["segments"][-1]["tokens"]) for each in (first, second) for t in each["trajectories"]]
    assert counted == lengths  # the token that completed a stop string is trained on, and nothing behind it


def test_rows_of_a_table_set_what_has_a_value(tmp_path):
    rows = lines(RECIPES / "tiny" / "train.jsonl")[:4]
    table = pa.Table.from_pylist(
        [{**row, "sampling": own} for row, own in zip(rows, [{"top_k": 3}, {"stop": ["1"]}, None, {}])]
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    settings = [f"data.train={tmp_path / 'rows.parquet'}", "rollout.row_overrides=['top_k','stop']"]
    found = check_inputs(from_json(small_recipe(tmp_path, *settings)))
    assert [prompt.sampling for prompt in found.prompts] == [{"top_k": 3}, {"stop": ["1"]}, None, None]


def test_recipes_know_whether_engines_draw_from_the_whole_distribution():
    assert Rollout().is_whole and Rollout(temperature=0.5, stop=["a"], row_overrides=["stop"]).is_whole
    changed = {"top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.1}
    changed |= {"frequency_penalty": 0.1, "min_new_tokens": 2}
    assert set(changed) == set(SHAPING) and set(OVERRIDES) == set(RowOverride.__args__)
    for key, value in changed.items():
        for rollout in (Rollout(**{key: value}), Rollout(row_overrides=["stop", key])):
            assert (
                not rollout.is_whole and f"rollout.{key}" in rollout.shaped_by
            ) or "row_overrides" in rollout.shaped_by
        assert not make_sampling(Rollout(**{key: value}), [1], None).is_whole
    made = make_sampling(Rollout(stop_ids=[4], stop=["x"]), [1, 9], "tokenizer")
    assert made.stop_ids == (1, 4, 9) and made.stop == StopStrings(["x"], None) and made.is_whole


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["algorithm.correction=mis", "rollout.top_k=5"], "correction='mis' with rollout.top_k=5"),
        (
            ["algorithm.trust_region=behaviour", "rollout.row_overrides=['min_p']"],
            "rollout.row_overrides=['min_p']",
        ),
        (["rollout.exact=true", "rollout.repetition_penalty=1.1"], "rollout.repetition_penalty=1.1"),
        (["rollout.min_new_tokens=5"], "min_new_tokens must be at most rollout.max_new_tokens=4"),
        (["rollout.stop=['']"], "an empty string would end every completion"),
        (["rollout.row_overrides=['temperature']"], "row_overrides"),
        (
            ["rollout.engine=vllm", "rollout.ahead=1", "rollout.presence_penalty=0.5"],
            "has not counted its tokens",
        ),
        (["rollout.stop_ids=[-1]"], "stop_ids"),
        (
            ["rollout.engine=vllm", "rollout.temperature=2.5"],
            "rollout.temperature=2.5 with rollout.engine='vllm'",
        ),
        (["rollout.engine=vllm", "rollout.temperature=0.005"], "draws at temperatures from 0.01 to 2"),
        (
            ["rollout.engine=vllm", "evaluation.temperature=0.001"],
            "temperature=0.001 of the evaluation of data.evaluation",
        ),
    ],
)
def test_what_cannot_work_is_refused_by_name(settings, said):
    with pytest.raises(ShardproofError) as caught:
        load_recipe(TINY, settings)
    assert said in str(caught.value)


def test_rows_and_stop_ids_are_checked_before_a_start(tmp_path):
    def refused(*settings: str) -> str:
        with pytest.raises(ShardproofError) as caught:
            check_inputs(from_json(small_recipe(tmp_path, *settings)))
        return str(caught.value)

    assert "rollout.stop_ids: 14 is no token" in refused("rollout.stop_ids=[3,14]")
    data = f"data.train={prepare(tmp_path)}"
    assert "'stop' is not in rollout.row_overrides" in refused(
        data, "rollout.row_overrides=['max_new_tokens']"
    )
    rows = write_rows(
        tmp_path / "ids.jsonl", [{"prompt": "1+1=", "answer": "2", "sampling": {"stop_ids": [14]}}]
    )
    assert "stop_ids: 14 is no token" in refused(f"data.train={rows}", "rollout.row_overrides=['stop_ids']")
    rows = write_rows(
        tmp_path / "short.jsonl", [{"prompt": "1+1=", "answer": "2", "sampling": {"max_new_tokens": 2}}]
    )
    longer = [
        f"data.train={rows}",
        "rollout.max_new_tokens=62",
        "data.evaluation=none",
        "output.eval_every=0",
    ]
    assert "max_new_tokens=62" in refused(*longer)
    own = check_inputs(from_json(small_recipe(tmp_path, *longer, "rollout.row_overrides=['max_new_tokens']")))
    assert own.prompts[0].sampling == {"max_new_tokens": 2}  # which is what its completions need room for
    talks = recipe_with(tmp_path, "NeverEnds", *longer, "rollout.row_overrides=['max_new_tokens']")
    assert check_inputs(from_json(talks)).canary == own.prompts[0].tokens
    held_out = [
        f"data.evaluation={rows}",
        "evaluation.max_new_tokens=1",
        "rollout.row_overrides=['max_new_tokens']",
    ]
    assert "max_new_tokens=2 is above the 1 that the recipe allows these rows" in refused(*held_out)
    for keys in (
        "evaluation.max_new_tokens=500",
        f"evaluation.sets=[{{name='a',source='{rows}',max_new_tokens=500}}]",
    ):
        key = keys.partition("=")[0] + (".0.max_new_tokens" if "sets" in keys else "")
        said = refused("output.eval_every=1", keys)
        assert f"{key}=500 does not fit the model's" in said and f"or lower {key};" in said
    recipe = small_recipe(tmp_path, data, "rollout.stop_ids=[3]")
    found = check_inputs(from_json(recipe))
    assert 3 in found.stop_ids and all(prompt.sampling is None for prompt in found.prompts)


def test_a_templates_end_of_a_turn_that_ends_no_completion_is_found():
    tokenizer = templates.make_tokenizer(templates.CHATML)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")

    def found(stop_ids=(), strings=(), template=templates.CHATML):
        tokenizer.chat_template = template
        return unheeded_end(Template(tokenizer), stop_ids, strings)

    assert found() == found([end + 1], ["<|eot|>"]) == (end, "<|im_end|>")
    assert found([3, end]) is found(strings=["<|im_end|>\n"]) is found(strings=["im_end|>"]) is None
    # Some templates write a space before it, and some no end at all, or refuse what is asked.
    spaced = "{% for m in messages %}{{ m.content }} </s>{% endfor %}"
    assert found(template=spaced) == (tokenizer.eos_token_id, "</s>")
    for other in (templates.PLAIN, templates.UNENDED, "{{ raise_exception('no') }}"):
        assert found(template=other) is None


ENDED = "{% for m in messages %}{{ m.content }}={% endfor %}"


@pytest.mark.parametrize(
    ("template", "settings", "warns"),
    [
        (ENDED, [], False),
        (ENDED, ["data.chat=true"], True),
        ("", ["data.chat=true", f"data.chat_template_kwargs.chat_template={ENDED!r}"], True),
    ],
)
def test_a_start_says_what_ends_no_completion(tmp_path, template, settings, warns, caplog):
    folder = tmp_path / "model"
    shutil.copytree(RECIPES / "tiny" / "model", folder)
    if template:
        (folder / "chat_template.jinja").write_text(template)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["="]})
    tokenizer.save_pretrained(folder)
    end = tokenizer.convert_tokens_to_ids("=")
    settings = [*settings, f"model.path={folder}"]
    check_inputs(from_json(small_recipe(tmp_path, *settings)))
    words = f"ends the model's turns with '=', which ends no completion: a model that says it goes on behind it; add its id to rollout.stop_ids: [{end}]"
    assert (words in caplog.text) is warns
    caplog.clear()
    check_inputs(from_json(small_recipe(tmp_path, *settings, f"rollout.stop_ids=[{end}]")))
    assert "ends no completion" not in caplog.text


def test_a_stop_string_that_is_the_templates_end_of_a_turn_is_not_written_again():
    tokenizer = templates.make_tokenizer(templates.HERMES)
    words = ChatFormat.of(tokenizer)
    rules = make_rules(
        format=words, decode=lambda tokens, plain: words.template.decode(tokens, special=not plain)
    )
    (prompt,) = words.prompt([{"role": "user", "content": "hi"}])
    said = (*words.template.encode("yes"), tokenizer.convert_tokens_to_ids("<|im_end|>"))
    conversation = begin(Start(Prompt({}, "", prompt.tokens), 0, 0, 5, 5), rules)
    asked = next_request(conversation).trajectory
    answered = asked.extended(Segment(said, "policy", (-1.0,) * len(said), 0, True), True, "<|im_end|>")
    assert take_turn(conversation, answered, 8).text == "yes"
    take_answer(conversation, Reply(messages="more"), 0.0, 8, 0)
    text = tokenizer.decode(conversation.current.tokens)
    assert text.endswith("yes<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n")


def test_a_turn_that_a_stop_string_ended_is_read_whole_and_goes_on():
    """The token that completed the string is part of the turn, and the template's own end of a turn follows it."""
    tokenizer = make_tokenizer()
    words = ChatFormat.of(tokenizer)
    rules = make_rules(
        format=words, decode=lambda tokens, plain: words.template.decode(tokens, special=not plain)
    )
    is_, one, end = tokenizer.convert_tokens_to_ids(["is", "one", "<end>"])
    prompt = Prompt({"prompt": "what is"}, "what is", (is_, one), sampling={"top_k": 3})
    start = Start(prompt, 0, 0, 5, 5)
    base = Sampling(8, stop=StopStrings(["one"], tokenizer))
    assert start.own_sampling(base) == replace(base, top_k=3)
    replies = {}
    for string, tokens in (("one", (is_, one)), ("", (is_, one, end))):
        conversation = begin(start, rules)
        request = next_request(conversation, start.own_sampling(base))
        said = Segment(tokens, "policy", (-1.0,) * len(tokens), 0, True)
        turn = take_turn(conversation, request.trajectory.extended(said, True, string), 8)
        assert (turn.text, turn.finished) == ("is one", True)
        take_answer(conversation, Reply(messages="two"), 0.0, 8, 0)
        assert not conversation.ended and not conversation.current.finished
        replies[string] = conversation.current.tokens[len(request.tokens) :]
    assert (
        replies["one"] == replies[""]
    )  # the end of the turn, which the policy did not say, is the template's
