"""Prompts: what is read, what is refused, the order, and the tokens."""

import json
import math
import os
import sys
import threading
import types
from datetime import date
from decimal import Decimal

import numpy
import pyarrow
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from shardproof.errors import ConfigError
from shardproof.rl.data import Prompt, PromptStream, rows_digest, sample_seed
from shardproof.rl.sources.encoding import encode_prompts
from tests.rl.runs import load_rows

WORDS = [
    "[UNK]",
    "<s>",
    "<user>",
    "<assistant>",
    "<system>",
    "<end>",
    "what",
    "is",
    "one",
    "two",
    "plus",
    "?",
]
TEMPLATE = (
    "<s>{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('there are no tools') }}{% endif %}"
    "<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def make_tokenizer(template=TEMPLATE):
    """A word a token, and a <s> in front where special tokens are asked for."""
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", bos_token="<s>")
    tokenizer.chat_template = template
    return tokenizer


def words(prompt):
    return " ".join(WORDS[token] for token in prompt.tokens)


def write(path, *rows):
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return str(path)


def nested(depth):
    return [] if depth == 1 else [nested(depth - 1)]


def refused(source, prompt="prompt", answer=None, rewards=()):
    with pytest.raises(ConfigError) as caught:
        load_rows(str(source), prompt, answer, rewards=rewards)
    assert caught.value.code == "C005"
    return str(caught.value)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_lines_are_rows_and_blank_lines_are_nothing(tmp_path, name):
    chat = [{"role": "user", "content": "hello"}]
    source = write(
        tmp_path / name, "\ufeff", {"prompt": "a\u2028b", "n": 1}, "\n", {"prompt": chat, "more": None}
    )
    assert load_rows(source, "prompt", None) == [
        {"prompt": "a\u2028b", "n": 1},
        {"prompt": chat, "more": None},
    ]


def test_the_answer_stands_where_rewards_look_for_it(tmp_path):
    source = write(tmp_path / "rows.jsonl", {"question": "1+1", "solution": 2})
    assert load_rows(source, "question", "solution") == [{"question": "1+1", "solution": 2, "answer": 2}]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "rows.jsonl holds no rows"),
        (["\n\n"], "rows.jsonl holds no rows"),
        ([{"prompt": "a"}, "{'prompt': 1}\n"], "rows.jsonl:2 is not valid JSON"),
        (["[\n"], "Expected one object per line, not an array"),
        (["[1]\n"], "rows.jsonl:1 begins an array. Expected one object per line"),
        ([{"prompt": "a"}, '{"prompt": ' + "[" * 200_000 + "\n"], "rows.jsonl:2 is not valid JSON: maximum recursion"),
        ([{"prompt": "a", "tree": nested(99)}, {"prompt": "a", "tree": nested(100)}], "rows.jsonl:2 is nested deeper than 100"),
        (['{"prompt": "a", "n": ' + "9" * 5000 + "}\n"], "rows.jsonl:1 is not valid JSON"),
        ([{"prompt": "a\ud800"}], "rows.jsonl:1: column 'prompt' holds text that is not valid Unicode"),
        ([{"prompt": [{"role": "user", "content": "\udfff"}]}], "rows.jsonl:1: column 'prompt': message 1 has text that is not valid"),
        ([{"prompt": "a"}, "\n", "3\n"], "rows.jsonl:3 is a JSON int"),
        ([{"prompts": "a", "x": 1}], "no column 'prompt' (data.prompt_column); it has 'prompts', 'x'. Did you mean 'prompts'?"),
        ([{"prompt": "a"}, {}], "rows.jsonl:2 has no column 'prompt' (data.prompt_column); it has none."),
        ([{"prompt": None}], "rows.jsonl:1: column 'prompt' holds NoneType"),
        ([{"prompt": 7}], "holds int; expected a string, or a list of {role, content}"),
        ([{"prompt": []}], "holds an empty list"),
        ([{"prompt": ["hello"]}], "message 1 is str"),
        ([{"prompt": [{"role": "user", "content": "x"}, {"role": "user"}]}], "message 2 has nothing as its 'content'"),
        ([{"prompt": [{"role": "user", "content": 3}]}], "message 1 has int as its 'content'"),
    ],
)  # fmt: skip
def test_unusable_rows_are_named_by_file_and_line(tmp_path, rows, said):
    assert said in refused(write(tmp_path / "rows.jsonl", *rows))


def test_a_prompt_may_hold_calls_that_say_nothing_besides(tmp_path):
    """It was refused, where the same message was a completion or stood in a whole conversation."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    asked, told = {"role": "user", "content": "1+1="}, {"role": "tool", "content": "2"}
    for message in ({"content": None, "tool_calls": [call]}, {"tool_calls": [call]}):
        row = {"prompt": [asked, {"role": "assistant", **message}, told]}
        assert load_rows(write(tmp_path / "rows.jsonl", row), "prompt", None) == [row]
    row = {"prompt": [asked, {"role": "assistant", "content": None, "tool_calls": []}, told]}
    assert "message 2 has NoneType as its 'content'" in refused(write(tmp_path / "rows.jsonl", row))


def test_an_answer_column_that_is_not_there_is_refused(tmp_path):
    source = write(tmp_path / "rows.jsonl", {"prompt": "a", "answers": "b"})
    message = refused(source, answer="answer")
    assert "rows.jsonl:1 has no column 'answer'" in message and "Did you mean 'answers'?" in message


@pytest.mark.parametrize(
    ("rewards", "row", "said"),
    [
        (["exact_match"], {"answer": None}, "rows.jsonl:2: reward 'exact_match': the row's 'answer' is null"),
        (["numeric"], {"answer": None}, "rows.jsonl:2: reward 'numeric': the row's 'answer' is null"),
        (["numeric"], {}, "rows.jsonl:2: reward 'numeric': the row has no 'answer'"),
        (["exact_match"], {"answer": True}, "the row's 'answer' is of type bool; expected text or a number"),
        (["numeric"], {"answer": False}, "the row's 'answer' is of type bool; expected text or a number"),
        (["exact_match"], {"answer": ["4"]}, "the row's 'answer' is of type list; expected text or a number"),
        (["numeric"], {"answer": math.nan}, "the row's 'answer' is nan; expected text or a number"),
        (["x:f", "regex"], {"answer": "4"}, "rows.jsonl:2: reward 'regex': the row has no 'pattern'"),
        (["regex"], {"pattern": 7}, "the row's 'pattern' is of type int; expected text"),
    ],
)
def test_rows_that_a_built_in_reward_cannot_score_are_named_by_file_and_line(tmp_path, rewards, row, said):
    good = {"prompt": "a", "answer": "4", "pattern": "4"}
    source = write(tmp_path / "rows.jsonl", good, {"prompt": "a", **row})
    assert said in refused(source, rewards=rewards)


def test_rewards_of_the_users_may_read_any_row(tmp_path):
    rows = [{"prompt": "a", "answer": answer} for answer in (None, True, ["4"], {}, 4, 4.5, "")]
    source = write(tmp_path / "rows.jsonl", *rows)
    assert load_rows(source, "prompt", "answer", rewards=["my_rewards:f", "regex(4)"]) == rows
    assert load_rows(write(tmp_path / "rows.jsonl", *rows[4:]), "prompt", "answer", rewards=["exact_match"])


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_a_fifo_is_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name)
    assert f"{name} is not a regular file" in refused(tmp_path / name)


def test_what_is_found_wrong_later_is_named_by_file_and_line_too(tmp_path):
    long, tool = "what is one plus two", [{"role": "tool", "content": "x"}]
    for prompt, said in ((long, "has 6 tokens"), (" \n", "is empty"), (tool, "template rejects")):
        source = write(tmp_path / "rows.jsonl", {"prompt": "what is one"}, "\n", {"prompt": prompt})
        with pytest.raises(ConfigError, match=r"rows.jsonl:3: the .*prompt.*") as caught:
            encode_prompts(load_rows(source, "prompt", None), make_tokenizer(), "prompt", False, 4)
        assert said in str(caught.value)


def test_hub_rows_that_cannot_be_read_or_sent_to_a_reward_are_refused(monkeypatch):
    library = types.ModuleType("datasets")

    def rows():
        yield {"prompt": "a"}
        yield {"prompt": "a", "clip": threading.Lock()}

    def broken():
        yield {"prompt": "a"}
        raise OSError("cannot decode the image")

    for make, said in (
        (rows, "row 2 cannot be sent to a reward: TypeError"),
        (broken, "row 2 cannot be read: OSError"),
    ):
        library.load_dataset = lambda *arguments, split, make=make: make()
        monkeypatch.setitem(sys.modules, "datasets", library)
        assert said in refused("hf:some/set")


def test_bytes_that_are_not_text_are_named_by_line(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    assert "rows.jsonl:2 is not valid JSON" in refused(tmp_path / "rows.jsonl")


def test_sources_that_are_not_there_are_refused(tmp_path):
    write(tmp_path / "train.jsonl", {"prompt": "a"})
    assert "Did you mean 'train.jsonl'?" in refused(tmp_path / "trai.jsonl")
    assert "does not exist" in refused(tmp_path / "nowhere" / "train.jsonl")
    write(tmp_path / "rows.txt", "prompt\n")
    assert "is not a .jsonl, .json, .csv, .tsv or .parquet file" in refused(tmp_path / "rows.txt")


def test_parquet_rows(tmp_path):
    rows = [
        {"prompt": [{"role": "user", "content": "a"}], "n": 1},
        {"prompt": [{"role": "user", "content": "b"}], "n": 2},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert load_rows(str(tmp_path / "rows.parquet"), "prompt", None) == rows
    assert "row 1 has no column 'prompts'" in refused(tmp_path / "rows.parquet", prompt="prompts")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "rows.parquet").read_bytes()[:-20])
    assert "cut.parquet cannot be read as Parquet" in refused(tmp_path / "cut.parquet")
    parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], "string")}), tmp_path / "none.parquet")
    assert "none.parquet holds no rows" in refused(tmp_path / "none.parquet")


def test_libraries_that_are_not_installed_are_named_with_the_remedy(tmp_path, monkeypatch):
    for name in ("pyarrow", "pyarrow.parquet", "datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "rows.parquet").touch()
    assert "pip install pyarrow" in refused(tmp_path / "rows.parquet")
    assert "pip install datasets" in refused("hf:openai/gsm8k")


@pytest.mark.parametrize(
    ("source", "asked"),
    [
        ("hf:some/set", ("some/set", None, "train")),
        ("hf:some/set:test", ("some/set", None, "test")),
        ("hf:some/set:test[:10]", ("some/set", None, "test[:10]")),
        ("hf:some/set:main:test", ("some/set", "main", "test")),
        ("hf:some/set:main:train[10:20]", ("some/set", "main", "train[10:20]")),
    ],
)
def test_hub_sources(monkeypatch, source, asked):
    library = types.ModuleType("datasets")

    def load_dataset(*arguments, split):
        assert (*arguments, split) == asked
        return [{"prompt": "a"}, {"prompt": "b"}]

    library.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", library)
    assert load_rows(source, "prompt", None) == [{"prompt": "a"}, {"prompt": "b"}]
    assert f"{source}, row 1 has no column 'promp'" in refused(source, prompt="promp")


def test_the_datasets_library_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "set").mkdir()
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "answer": "3"}]
    write(tmp_path / "set" / "train.jsonl", *rows)
    assert load_rows(f"hf:{tmp_path / 'set'}", "prompt", "answer") == rows
    assert load_rows(f"hf:{tmp_path / 'set'}:train[:1]", "prompt", "answer") == rows[:1]


def test_one_part_after_a_hub_name_is_a_split_or_a_config(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    configs = ""
    for config in ("main", "other"):
        (tmp_path / "set" / config).mkdir(parents=True)
        write(tmp_path / "set" / config / "train.jsonl", {"prompt": config})
        configs += f"- config_name: {config}\n  data_files:\n  - split: train\n    path: {config}/*.jsonl\n"
    (tmp_path / "set" / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    source = f"hf:{tmp_path / 'set'}"
    for named in (f"{source}:other", f"{source}:other:train"):
        assert load_rows(named, "prompt", None) == [{"prompt": "other"}]
    for named in (source, f"{source}:train", f"{source}:neither", f"{source}:other[:1]"):
        assert "Config name is missing" in refused(named)


def test_hub_sources_that_cannot_be_loaded(monkeypatch):
    library = types.ModuleType("datasets")

    def load_dataset(*arguments, split):
        raise ConnectionError("offline mode is enabled")

    library.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", library)
    assert "cannot be loaded: ConnectionError: offline mode is enabled" in refused("hf:some/set")
    assert "is not hf:name[:config][:split]" in refused("hf:some/set:a:b:c")


def test_every_epoch_is_a_permutation_of_its_own():
    stream = PromptStream(50, seed=3)
    epochs = [stream.take(50) for _ in range(4)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 4
    assert PromptStream(50, seed=4).take(50) != epochs[0]
    assert PromptStream(50, seed=-1).take(50) != epochs[0]


def test_the_order_does_not_depend_on_how_much_is_taken_at_a_time():
    whole = PromptStream(7, seed=0).take(100)
    for size in (1, 3, 7, 20):
        stream = PromptStream(7, seed=0)
        parts = []
        while len(parts) < 100:
            parts += stream.take(size)
        assert parts[:100] == whole and stream.position == len(parts)


def test_the_order_is_written_down():
    # A run that is resumed under another release of numpy or Python must go on in the same order.
    assert PromptStream(10, seed=0).take(12) == [0, 2, 9, 1, 8, 5, 4, 3, 6, 7, 5, 3]


def test_a_position_resumes_exactly():
    stream = PromptStream(11, seed=5)
    stream.take(17)
    position, following = stream.position, stream.take(40)
    resumed = PromptStream(11, seed=5)
    resumed.position = position
    assert (position, resumed.take(40)) == (17, following)
    stream.position = 0
    assert stream.take(17) == PromptStream(11, seed=5).take(17)


def test_streams_that_cannot_be():
    with pytest.raises(ConfigError, match="C005"):
        PromptStream(0, seed=0)
    with pytest.raises(ConfigError, match="negative"):
        PromptStream(3, seed=0).position = -1
    assert PromptStream(3, seed=0).take(0) == []


def test_plain_prompts_get_the_tokenizers_special_tokens():
    rows = [{"prompt": "what is one"}, {"prompt": "two"}]
    first, second = encode_prompts(rows, make_tokenizer(), "prompt", chat=False, max_prompt_tokens=None)
    assert (first.row, first.text, words(first)) == (rows[0], "what is one", "<s> what is one")
    assert second.tokens == (1, WORDS.index("two"))


def test_chat_prompts_go_through_the_template_with_one_beginning():
    system = [{"role": "system", "content": "plus"}, {"role": "user", "content": "two ?"}]
    rows = [{"q": "what is one ?"}, {"q": system}]
    first, second = encode_prompts(rows, make_tokenizer(), "q", chat=True, max_prompt_tokens=None)
    assert first.text == "<s><user> what is one ? <end> <assistant> "
    assert words(first) == "<s> <user> what is one ? <end> <assistant>"
    assert words(second) == "<s> <system> plus <end> <user> two ? <end> <assistant>"


def test_a_list_goes_through_the_template_also_without_chat():
    rows = [{"prompt": "one"}, {"prompt": [{"role": "user", "content": "two"}]}, {"prompt": "plus"}]
    prompts = encode_prompts(rows, make_tokenizer(), "prompt", chat=False, max_prompt_tokens=None)
    assert [prompt.text for prompt in prompts] == ["one", "<s><user> two <end> <assistant> ", "plus"]
    assert [words(prompt) for prompt in prompts][::2] == ["<s> one", "<s> plus"]


def test_an_unfinished_answer_is_continued():
    turns = [{"role": "user", "content": "what"}, {"role": "assistant", "content": "one plus"}]
    (prompt,) = encode_prompts([{"prompt": turns}], make_tokenizer(), "prompt", False, None)
    assert prompt.text == "<s><user> what <end> <assistant> one plus"


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("what is one plus two", "row 2: the prompt has 6 tokens, more than data.max_prompt_tokens=4; 1 of 2 rows"),
        ("", "row 2: the prompt is empty"),
        (" \n", "row 2: the prompt is empty"),
        ([{"role": "tool", "content": "x"}], "row 2: the chat template rejects the prompt: there are no tools"),
    ],
)  # fmt: skip
def test_unusable_prompts_are_named_by_row(prompt, said):
    rows = [{"prompt": "what is one"}, {"prompt": prompt}]
    with pytest.raises(ConfigError) as caught:
        encode_prompts(rows, make_tokenizer(), "prompt", chat=False, max_prompt_tokens=4)
    assert caught.value.code == "C005" and said in str(caught.value)


def test_an_empty_prompt_is_refused_although_its_template_is_not_empty():
    with pytest.raises(ConfigError, match="row 1: the prompt is empty"):
        encode_prompts([{"prompt": ""}], make_tokenizer(), "prompt", chat=True, max_prompt_tokens=None)


def test_a_tokenizer_without_a_template_is_refused():
    with pytest.raises(ConfigError, match="the tokenizer has none"):
        encode_prompts([{"prompt": "one"}], make_tokenizer(None), "prompt", chat=True, max_prompt_tokens=None)


def test_the_digest_of_rows_sees_content_and_order_and_nothing_else():
    def digest(*rows):
        return rows_digest([Prompt(row, "", ()) for row in rows])

    one, other = {"prompt": "1", "answer": 1}, {"prompt": "2", "answer": "2"}
    assert digest(one, other) == digest({"answer": 1, "prompt": "1"}, dict(other))
    odd = [digest(), digest(one), digest(other, one), digest(one, other, one)]
    odd += [digest(one, {**other, "answer": answer}) for answer in (2, 2.0, None, True, "\ud800", math.nan)]
    odd += [digest(one, {**other, "answer": answer}) for answer in (b"2", Decimal(2), date(2026, 1, 1))]
    odd += [digest(one, {**other, "answer": numpy.arange(n)}) for n in (2, 3)]
    assert len({digest(one, other), *odd}) == 1 + len(odd)
    assert digest({"clip": object()}) == digest({"clip": object()}), "an address is no content"


@pytest.mark.parametrize(
    "answer", [3, "3", Decimal(3), date(2026, 1, 1), b"3", math.nan, {"year": date(2026, 1, 1)}]
)
def test_what_a_trajectory_is_known_by_can_be_written_to_a_checkpoint(answer):
    facts = Prompt({"answer": answer}, "", (), source="sums", number=3).facts
    assert json.loads(json.dumps(facts)) == {"row": 3, "source": "sums", "answer": str(answer)}
    assert "answer" not in Prompt({"answer": None}, "", ()).facts


def test_sample_seeds_are_distinct_63_bit_and_fixed():
    seeds = {sample_seed(run, step, index) for run in range(3) for step in range(20) for index in range(50)}
    assert len(seeds) == 3000 and all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62
    assert sample_seed(1, 11, 1) != sample_seed(11, 1, 1) != sample_seed(1, 1, 11)
    assert sample_seed(0, 0, 0) == 3051931488724851722
