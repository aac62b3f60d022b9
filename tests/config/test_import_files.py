"""Files as they are found: shell scripts of all kinds, references, and what is no config."""

from __future__ import annotations

import pytest

from shardproof.config.imported.files import read_config
from shardproof.errors import ConfigError
from tests.config.test_import_config import imported


def script(tmp_path, text, *overrides):
    path = tmp_path / "run.sh"
    path.write_text(text)
    return read_config(path, overrides)


def test_a_variable_is_set_where_a_command_begins_and_not_by_what_is_said(tmp_path):
    found = script(
        tmp_path,
        """
BACKEND=vllm
if [ "$BACKEND" = trtllm ]; then echo "BACKEND=trtllm needs a GPU"; fi
A=1 B=2 && C=3
X=gpu
case $X in
  gpu) D=4 ;;
  *) D=40 ;;
esac
python -m main a.backend=$BACKEND a.sum=$((A + B + C + D))
""",
    )
    assert found == {"a.backend": "vllm", "a.sum": 10}


def test_words_in_variables_and_arrays_are_arguments(tmp_path):
    found = script(
        tmp_path,
        """
MORE="a.x=1 a.y='two words'"
LIST=(
    a.z=[1,2]   # a comment
    "a.name=it's"
)
python -m main $MORE "${LIST[@]}" "$@"
""",
    )
    assert found == {"a.x": 1, "a.y": "two words", "a.z": [1, 2], "a.name": "it's"}


def test_settings_of_no_section_and_groups_of_configs_are_settings_too(tmp_path):
    found = script(
        tmp_path,
        """
A=1 env mode=debug python --with torch==2.7 -m main engine=megatron model.path=a actor@model.actor=lite \\
  +bench=default tries=3 +model.args.max-model-len=4 > log.txt
""",
    )
    assert found == {
        "engine": "megatron",
        "model.path": "a",
        "actor@model.actor": "lite",
        "bench": "default",
        "tries": 3,
        "model.args.max-model-len": 4,
    }


def test_what_a_command_would_say_is_one_word(tmp_path):
    text = 'HERE="$(cd "$(dirname "$0")" && pwd)"\nNAME=${NAME_OF_NOTHING:-run_$(date +%Y %m)}\n'
    found = script(tmp_path, f"{text}python main a.here=$HERE/x a.name=$NAME a.last=1")
    assert found == {"a.here": "$(...)/x", "a.name": "run_$(...)", "a.last": 1}


def test_what_is_no_yaml_stays_text_and_a_section_replaces_its_keys(tmp_path):
    found = script(tmp_path, r"python main 'a.rules={x.\{*\}:{}}' a.b.c=1 a.b.d=2", "a.b={c: 5}")
    assert found == {"a.rules": r"{x.\{*\}:{}}", "a.b.c": 5}


def test_unknown_variables_and_commands_are_to_be_filled_in(tmp_path, monkeypatch):
    monkeypatch.delenv("NOWHERE", raising=False)
    text = """
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4 \\
    actor_rollout_ref.model.path=$NOWHERE/model trainer.default_local_dir=$(pwd)/out \\
    trainer.experiment_name=${NOWHERE:?must be set} data.train_files=a.parquet \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=$NOWHERE
"""
    made = imported(tmp_path, text, name="run.sh")
    asked = {"model.path": "$NOWHERE", "output.folder": "$(", "output.run_name": "${NOWHERE:?must"}
    asked |= {"rollout.vllm.tensor_parallel_size": "$NOWHERE"}
    assert {key: value in made.draft.to_fill[key] for key, value in asked.items()} == dict.fromkeys(
        asked, True
    )
    assert "model.path: actor_rollout_ref.model.path: $NOWHERE is not known here" in "\n".join(
        f"{key}: {what}" for key, what in made.draft.to_fill.items()
    )


def test_a_number_that_is_an_unknown_variable_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.delenv("NOWHERE", raising=False)
    with pytest.raises(ConfigError, match=r"total_epochs='\$\{NOWHERE\}' is no value that verl takes"):
        imported(
            tmp_path, "python main algorithm.adv_estimator=grpo trainer.total_epochs=${NOWHERE}", name="a.sh"
        )


def test_the_setting_that_is_at_fault_is_named_and_not_the_one_that_was_looked_at_last(tmp_path, monkeypatch):
    monkeypatch.delenv("NOWHERE", raising=False)
    known = "algorithm.adv_estimator=grpo actor_rollout_ref.actor.ulysses_sequence_parallel_size=4"
    for key, value in (("trainer.n_gpus_per_node", "$NOWHERE"), ("trainer.n_gpus_per_node", "many")):
        with pytest.raises(ConfigError, match=f"{key}='.?{value[1:]}' is no value that verl takes"):
            imported(tmp_path, f"python main {known} {key}={value} trainer.save_freq=$NOWHERE/5", name="a.sh")


def test_references_count_from_their_section(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("""
a: {b: {c: '${.d}', d: 4, e: '${..f}', g: '${oc.select:no.where,7}', h: '${a.b.d}-${no.where}'}, f: 5}
round: ['${one}', '${two}']
one: ${two}
two: ${one}
""")
    found = read_config(path)
    assert {key: found[f"a.b.{key}"] for key in "cegh"} == {"c": 4, "e": 5, "g": 7, "h": "4-${no.where}"}
    assert set(found["round"]) <= {"${one}", "${two}"}


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]"
    for before, name in zip("abcdefg", "bcdefgh", strict=True)
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds nothing"),
        ("just words", "holds a str"),
        ("!!python/object/apply:os.system ['true']", "could not determine a constructor"),
        (BOMB, "holds more than 200000 values"),
        ("a: &a {b: *a}", "holds more than 200000 values, or itself"),
        ("a: &a [*a]", "holds more than 200000 values, or itself"),
        ("\n".join(f"k{number}: 1" for number in range(10_001)), "10001 settings; the limit is 10000"),
        ("a: \x00", "cannot be read"),
    ],
)
def test_what_is_no_config_is_refused(tmp_path, text, said):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_config(path)


def test_references_that_grow_end_early(tmp_path):
    """Each value holds the next one many times: put in one after the other they would fill the memory."""
    lines = [f"k{number}: '{f'${{k{number + 1}}}' * 40}'" for number in range(9)]
    path = tmp_path / "config.yaml"
    path.write_text("\n".join([*lines, "k9: x"]))
    assert all(len(value) < 10_000_000 for value in read_config(path).values())
    defined = "\n".join(f'V{number}="{f"$V{number - 1}" * 40}"' for number in range(1, 9))
    with pytest.raises(ConfigError, match="a word of more than 100000 characters"):
        script(tmp_path, f"V0=xxxx\n{defined}\npython main a.b=1")


def test_a_mark_at_the_beginning_is_no_part_of_the_first_key(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\r\nb: &x {c: 2}\r\nd: *x\r\n")
    assert read_config(path) == {"a": 1, "b.c": 2, "d.c": 2}


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("a.b={thinking:false,effort:'low'}", {"a.b.thinking": False, "a.b.effort": "low"}),
        ("a.b={x:{y:1e-3},z:[1,2e4]}", {"a.b.x.y": 1e-3, "a.b.z": [1, 2e4]}),
        ("a.b={path:/data/x,url:s3://y}", {"a.b.path": "/data/x", "a.b.url": "s3://y"}),
        ("a.b=[0.9,1e-6,s3://x]", {"a.b": [0.9, 1e-6, "s3://x"]}),
        ("++a.b=1E5", {"a.b": 1e5}),
        ("~a.c=4", {}),
    ],
)
def test_arguments_are_read_as_hydra_reads_them(tmp_path, argument, expected):
    assert script(tmp_path, f"python main a.b=0 a.c=4 a.d=1 '{argument}'") == {
        **({"a.c": 4} if "~" not in argument else {"a.b": 0}),
        "a.d": 1,
        **expected,
    }


def test_a_config_lies_over_those_that_it_names(tmp_path):
    (tmp_path / "base.yaml").write_text("defaults: [deep, _self_]\na: {x: 1, y: 1, z: 1}\nb: {c: {d: 1}}")
    (tmp_path / "deep.yaml").write_text("defaults: [base]\na: {x: 0, w: 2e-5}")
    (tmp_path / "run.yaml").write_text("defaults: [ppo_trainer, a@b, base, gone, _self_]\na: {y: 2}")
    notes = []
    found = read_config(tmp_path / "run.yaml", ["a.z=3"], notes)
    assert {key: value for key, value in found.items() if key != "defaults"} == {
        "a.x": 1, "a.w": 2e-5, "a.y": 2, "a.z": 3, "b.c.d": 1,
    }  # fmt: skip
    assert [note.partition(",")[0] for note in notes] == ["defaults names base", "defaults names gone"]


def test_the_config_that_a_script_names_is_under_its_settings(tmp_path):
    folder = tmp_path / "recipe" / "config"
    folder.mkdir(parents=True)
    path = tmp_path / "recipe" / "run.sh"
    start = "python -m main --config-path=/root/recipe/config --config-name"
    path.write_text(f"{start} mine.yaml a.y=2 b.c=off_now")
    notes = []
    assert read_config(path, (), notes) == {"a.y": 2, "b.c": "off_now"}
    assert notes == ["the command names the config mine.yaml, which was not found: its settings are missing"]
    (folder / "mine.yaml").write_text("defaults: [ppo_trainer, _self_]\na: {x: 1, y: 1}\nb: {c: {d: 1}}")
    notes = []
    found = read_config(path, (), notes)
    assert {key: found[key] for key in found if key != "defaults"} == {"a.x": 1, "a.y": 2, "b.c": "off_now"}
    path.write_text(f"{start}='ppo_megatron_trainer.yaml' a.y=2")
    assert (read_config(path, (), notes), notes) == ({"a.y": 2}, [])
