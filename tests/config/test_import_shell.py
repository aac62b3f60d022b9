"""Scripts that start a run: the settings are those that running the script would give."""

from __future__ import annotations

import pytest

from shardproof.cli.import_config import told
from shardproof.config.imported.files import read_config
from shardproof.errors import ConfigError
from tests.config.test_import_config import imported

FOLLOWED = [
    ("B=npu\nif [ $B = npu ]; then N=1; elif [ $B = gpu ]; then N=2; else N=3; fi", "$N", 1),
    ("B=gpu\nif [ $B = npu ]; then N=1; elif [ $B = gpu ]; then N=2; else N=3; fi", "$N", 2),
    ("if [ -z \"$NOBODY_SETS_IT\" ]; then N=1\nelse\nN=2\nfi", "$N", 1),
    ("N=1\nif [[ -n \"$NOBODY_SETS_IT\" && a == a ]]; then N=2; fi", "$N", 1),
    ("N=1\nif [[ vllm_x == vllm* || 1 -gt 2 ]]; then N=2; fi", "$N", 2),
    ("N=5\nif ! (( N > 4 )); then N=2; fi", "$N", 5),
    ("N=1\nif [ 2 -ge 3 ] || { [ x = x ] && [ y != z ]; }; then N=2; fi", "$N", 2),
    ("N=1\n[ x = y ] && N=2\n[ x = y ] || N=$((N + 5))", "$N", 6),
    ("LOSS=kl\ncase $LOSS in\n  tv) C=1 ;;\n  kl | other) C=2 ;;\n  *) echo no; exit 1 ;;\nesac", "$C", 2),
    ("case ${MODE_OF_NOBODY:-} in\n(a) C=1 ;;\n*) C=3 ;;\nesac", "${D:-$C}", 3),
    ("MORE=(x.y=1)\nMORE+=(\"a.b=7\")\nset -- \"${MORE[@]}\"", "1 \"$@\"", 7),
    ("two() { V=$1; }\ntwo 4", "$V", 4),
    ("for seed in 1 2 3; do N=$seed; done", "$N", 3),
    ("while [ $# -gt 0 ]; do N=9; shift; done\nN=${N:-1}", "$N", 1),
    ("( N=8 )\nN=${N:-2}", "$N", 2),
    ("M=Qwen/Qwen3-8B.gguf\nM=${M##*/}\nM=${M%.*}", "${M/8B/4B}", "Qwen3-4B"),
    ("X=", "${X:+9}${X-3}4", 4),
    ("A=(5 6)", "${A[1]}${#A[@]}", 62),
    ("cat > note.txt <<EOF\nN=3 a.b=2\nEOF\nN=4", "$N", 4),
    ("echo 'a.b=5' # it's said, not set", "1", 1),
]  # fmt: skip


@pytest.mark.parametrize(("before", "value", "expected"), FOLLOWED)
def test_a_script_is_followed_as_a_shell_does(tmp_path, monkeypatch, before, value, expected):
    monkeypatch.setenv("HOME", "/home/me")
    path = tmp_path / "run.sh"
    path.write_text(f"set -euo pipefail\n{before}\npython3 -m main a.b={value}\n")
    notes = []
    assert read_config(path, (), notes)["a.b"] == expected
    assert notes == []


DEVICES = """
DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
case "$DEVICE" in
  gpu) BATCH=1024; MORE=(trainer.n_gpus_per_node=8) ;;
  npu) BATCH=16; MORE=(trainer.n_gpus_per_node=16) ;;
esac
python3 -m main algorithm.adv_estimator=grpo data.train_batch_size=$BATCH "${MORE[@]}" "$@"
"""


def test_what_only_running_it_would_tell_is_said_with_the_settings_that_depend_on_it(tmp_path, monkeypatch):
    monkeypatch.delenv("DEVICE", raising=False)
    made = imported(tmp_path, DEVICES, name="run.sh")
    assert made.draft.values["train.prompts_per_step"] == 1024
    (note,) = made.notes
    assert "import torch_npu" in note and "data.train_batch_size=16, trainer.n_gpus_per_node=16" in note
    assert note in "\n".join(told(made, None)) and note in made.text
    monkeypatch.setenv("DEVICE", "npu")
    made = imported(tmp_path, DEVICES, name="run.sh")
    assert (made.draft.values["train.prompts_per_step"], made.notes) == (16, ())


def test_a_file_that_may_be_there_is_a_way_of_its_own(tmp_path):
    text = 'M=/models/x\nif [ ! -d "$M" ]; then M=org/x; fi\npython main a.path=$M a.last=1'
    path = tmp_path / "run.sh"
    path.write_text(text)
    notes = []
    assert read_config(path, (), notes) == {"a.path": "/models/x", "a.last": 1}
    assert len(notes) == 1 and 'line 2: if [ ! -d "$M" ]' in notes[0] and "a.path='org/x'" in notes[0]


def test_a_script_that_hands_its_settings_on_is_read_with_the_other(tmp_path):
    folder = tmp_path / "examples" / "gspo"
    folder.mkdir(parents=True)
    path = folder / "run.sh"
    path.write_text('bash examples/base.sh a.loss=gspo "$@"')
    notes = []
    assert read_config(path, (), notes) == {"a.loss": "gspo"}
    assert "examples/base.sh gets settings, and was not found" in notes[0]
    (folder.parent / "base.sh").write_text('python -m main a.loss=ppo a.lr=3 "$@"')
    notes = []
    assert read_config(path, ["a.lr=4"], notes) == {"a.loss": "gspo", "a.lr": 4}
    assert notes == []
    path.write_text('HERE="$(cd "$(dirname "$0")" && pwd)"\nbash "$HERE/gone.sh"')
    with pytest.raises(ConfigError, match=r"runs gone\.sh, not found"):
        read_config(path)


def test_words_after_c_and_documents_are_scripts_too(tmp_path):
    path = tmp_path / "run.sh"
    path.write_text(
        'L=3\nsrun --nodes 2 bash -c "python main a.lr=$L"\nCMD="python main a.n=4"\neval "$CMD"\n'
        "sbatch <<'EOF'\npython main a.m=5\nEOF\n"
    )
    assert read_config(path) == {"a.lr": 3, "a.n": 4, "a.m": 5}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("f() { f; }\nf", "calls itself"),
        ("A=(x x)\n" + "A+=(\"${A[@]}\" \"${A[@]}\")\n" * 40, "holds more than a script has|words"),
        ("for a in 1 2 3 4 5 6 7 8 9; do\n" * 9 + "N=1\n" + "done\n" * 9, "more than 20000 commands"),
        ("for a in " + "1 " * 900 + "; do\n: " + "x" * 90_000 + "\ndone", "says more than a script"),
        ("python main a.b='c", "a quotation is not closed"),
        ("X=(a b", "an array is not closed"),
        ("( " * 500, "nested"),
        ("trl grpo --learning_rate 1e-6 --num_generations 8", "write options of TRL's"),
        ("a=" + "$(" * 5000, "cannot be read"),
    ],
)  # fmt: skip
def test_a_script_that_has_no_end_is_refused(tmp_path, text, said):
    path = tmp_path / "run.sh"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_config(path)
