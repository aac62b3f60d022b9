"""The reward `code`: programs that are right, wrong, endless and sly, in the real sandbox."""

import asyncio
import sys
from datetime import date

import pytest

from shardproof.environments import sandbox, sandbox_child
from shardproof.errors import ConfigError
from shardproof.rl.rewards.code import program_of
from shardproof.rl.rewards.functions import find_reward, row_problem
from shardproof.rl.rewards.runner import RewardRunner
from shardproof.rl.rewards.specs import RewardSpec

DOUBLE = [
    {"input": "3\n", "output": "6\n"},
    {"input": "-4", "output": "-8"},
    {"input": "x", "output": "error"},
]

# As HumanEval has it: `check` is called with the function that another column names.
HUMAN_EVAL = 'METADATA = {"author": "jt"}\n\ndef check(candidate):\n    assert candidate(1) == 2\n'

# As LiveCodeBench has it, with each argument in a line.
FUNCTIONAL = {
    "input": "[1, 2]\n3\n",
    "output": "[4, 5]",
    "testtype": "functional",
    "metadata": {"func_name": "add"},
}


def fenced(program):
    return f"Let me see.\n```python\n{program}\n```\nThat is it."


def scored(tests, *programs, **options):
    function = find_reward(RewardSpec("code", options=options))

    async def every():
        samples = [[("", program, {"tests": tests})] for program in programs]
        return [found[0] for found in await asyncio.gather(*map(function.later, samples))]

    found = asyncio.run(every())
    assert [each.error for each in found] == [None] * len(found)
    return [each.value for each in found]


def test_what_programs_print_is_compared_case_by_case():
    programs = [
        "print(int(input()) * 2)",
        "import sys\nprint(2 * int(sys.stdin.buffer.read()), end='  \\n\\n')",
        "n = int(open(0).read())\nprint(n * 2)\nraise SystemExit(1)",  # it did not end well
        "print(6)",
        "6",  # the value of a line is not printed
        "import sys\nprint(6, file=sys.stderr)",
        "def f(:",
    ]
    found = scored(DOUBLE, *map(fenced, programs), "print(int(input()) * 2)")
    assert found == pytest.approx([2 / 3, 2 / 3, 0, 1 / 3, 0, 0, 0, 0])
    assert scored(DOUBLE[:2], *map(fenced, programs[:1] + programs[3:4]), score="all") == [1.0, 0.0]
    assert scored(DOUBLE, programs[0], fenced=False, max_tests=2) == [1.0]


def test_tests_that_are_code_run_behind_the_program_each_on_its_own():
    tests = ["assert f(1) == 2", "counter = f(2)\nassert counter == 3", "assert f(3) == 0"]
    programs = [
        "def f(x):\n    return x + 1",
        "def f(x):\n    return x + 1\nif __name__ == '__main__':\n    raise ValueError",
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int' = 1\ndef f(x):\n    return x + A().x",
        "raise SystemExit(0)",
        "import os\nos._exit(0)",
        "print('passed')\nexit()",
    ]
    assert scored(tests, *map(fenced, programs)) == pytest.approx([2 / 3, 2 / 3, 2 / 3, 0, 0, 0])


def test_a_program_that_replaces_what_runs_tests_still_meets_them():
    without_asserts = """
import builtins, re
compiled, executed = compile, exec
def compile(source, *given, **more):
    return compiled(re.sub("assert.*", "pass", source) if isinstance(source, str) else source, *given, **more)
def exec(source, *given):
    try:
        executed(source, *given)
    except AssertionError:
        executed("import os; os._exit(0)", *given)
builtins.compile, builtins.exec = compile, exec
def f(x):
    return 0
"""
    assert scored(["assert f(1) == 2", "assert f(1) == 0"], fenced(without_asserts)) == [0.5]


def test_a_long_output_is_compared_to_its_end():
    tests = [{"input": "200000", "output": "1234567\n" * 200_000}]  # 1.6 MB
    program = "n = int(input())\nfor k in range({}):\n    print(1234567)"
    assert scored(tests, *[fenced(program.format(n)) for n in ("n", "n - 1")]) == [1.0, 0.0]


def test_no_end_of_a_program_makes_its_test_a_part_of_it():
    test = "def check(candidate):\n    assert candidate(1) == 2"
    swallows = "def f(x):\n    return 0\nasync \\"  # and what is never awaited holds
    assert scored([test + "\ncheck(f)"], swallows, fenced=False) == [0.0]
    right = "def f(x):\n    return x + 1  # \\"
    assert scored(["from __future__ import annotations\nassert f(1) == 2"], fenced(right)) == [1.0]


def test_a_function_is_called_by_name_alone_or_of_a_class():
    tests = '{"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [3, [[1, 2]]]}'
    plain, method = (
        "def add(a, b):\n    return a + b",
        "class Solution:\n    def add(self, a, b):\n        return a + b",
    )
    assert scored(tests, fenced(plain), fenced(method), fenced("add = max")) == [1.0, 1.0, 0.0]


def test_arguments_in_lines_and_columns_of_inputs_are_tests_too():
    right = "class Solution:\n    def add(self, values, n):\n        return [value + n for value in values]"
    assert scored([FUNCTIONAL], fenced(right), fenced("print([4, 5])")) == [1.0, 0.0]
    assert scored([{**FUNCTIONAL, "metadata": None, "fn_name": "add"}], fenced(right)) == [1.0]
    # As code_contests has them: two tests, not one of two lines.
    tests = {"input": ["3", "4"], "output": ["6", "9"]}
    assert scored(tests, fenced("print(int(input()) * 2)"), fenced("print(6)")) == [0.5, 0.5]
    assert scored([{"input": None, "output": "6"}], fenced("print(6 + len(open(0).read()))")) == [1.0]


def test_a_prelude_runs_before_the_program():
    program = fenced("from __future__ import annotations\nSeen = List[int]\ndef add(a, b):\n    return a + b")
    tests = {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}
    assert scored(tests, program) == [0.0]
    assert scored(tests, program, prelude="from typing import *") == [1.0]
    assert scored([{"input": "", "output": "2"}], fenced("print(two)"), prelude="two = 2") == [1.0]


def test_what_a_function_should_return_is_not_in_its_process():
    tests = {"fn_name": "f", "inputs": [[1]], "outputs": [{"a": [2, None]}]}
    right = "def f(x):\n    return {'a': (x + 1, None)}"
    equal_to_all = (
        "class A(dict):\n    def __eq__(self, other):\n        return True\ndef f(x):\n    return A()"
    )
    other_json = "import json\njson.loads = lambda text: [1]\njson.dumps = lambda found: '[1]'\ndef f(x):\n    return 1"
    deep = "import os\nos.write(1, b'[' * 400_000)\ndef f(x):\n    import json\n    json.dumps = lambda x: '[' * 400_000"
    programs = (right, equal_to_all, other_json, deep)
    assert scored(tests, *map(fenced, programs)) == [1.0, 0.0, 0.0, 0.0]
    looked = """
import re, sys
frame, seen = sys._getframe(), ""
while frame:
    seen += str(frame.f_code.co_consts) + str(frame.f_locals)
    frame = frame.f_back
def f(x):
    return re.search("told-[0-9]+|$", seen)[0]
"""
    told = {"fn_name": "f", "inputs": [["told-12"], ["x"]], "outputs": ["told-12", "told-34"]}
    assert scored(told, fenced(looked)) == [0.5]  # arguments are there, what is expected is not


def test_no_exit_status_of_a_program_passes_for_a_failure_of_the_sandbox():
    tests, codes = [{"input": "", "output": "1"}], (sandbox_child.FAILED, 1, 255)
    assert (
        scored(tests, *[fenced(f"print(1, flush=True)\nraise SystemExit({code})") for code in codes])
        == [0.0] * 3
    )
    assert scored(["assert True"], fenced(f"import os\nos._exit({sandbox_child.FAILED})")) == [0.0]


def test_an_endless_program_is_wrong_and_not_a_failure():
    tests = [{"input": "", "output": "1"}, {"input": "", "output": "1"}]
    endless, sometimes = "while True: pass", "import time\ntime.sleep(1000)"
    assert scored(tests, fenced(endless), fenced(sometimes), timeout_s=0.5) == [0.0, 0.0]
    assert scored(tests, fenced(endless), timeout_s=60, total_s=0.5) == [0.0]


def test_programs_that_run_at_once_have_their_time_each(monkeypatch):
    monkeypatch.setattr(
        "shardproof.environments.sandbox._AT_ONCE", 1
    )  # for the tool, whose calls wait for each other
    slow = fenced("import time\ntime.sleep(1)\nprint(1)")
    assert scored([{"input": "", "output": "1"}], *[slow] * 4, total_s=3.0) == [1.0] * 4


def test_a_program_has_no_network_no_files_of_others_and_little_memory(tmp_path):
    (tmp_path / "secret").write_text("1")
    tests = [{"input": "", "output": "1"}]
    programs = [
        f"print(open({str(tmp_path / 'secret')!r}).read())",
        "import socket\nsocket.create_connection(('127.0.0.1', 80))\nprint(1)",
        "import os\nos.fork()\nprint(1)",
        "x = bytearray(10**9)\nprint(1)",
    ]
    assert scored(tests, *map(fenced, programs), memory_mb=256) == [0.0] * 4


def test_a_program_cannot_read_where_the_run_was_started_though_it_lies_beside_libraries(
    tmp_path, monkeypatch
):
    for name in ("lib", "src/app", "src/other"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "answers").write_text("1")
    monkeypatch.chdir(tmp_path / "src" / "app")
    monkeypatch.setattr(sandbox, "_LIBRARIES", (*sandbox._LIBRARIES, str(tmp_path)))
    monkeypatch.setattr(sandbox, "_readable", sandbox._readable.__wrapped__)
    programs = [
        f"print(open({str(tmp_path / name / 'answers')!r}).read())"
        for name in ("lib", "src/other", "src/app")
    ]
    tests = [{"input": "", "output": "1"}]
    assert scored(tests, *map(fenced, programs)) == [1.0, 1.0, 0.0]
    monkeypatch.chdir(sys.base_prefix)  # without which there is no interpreter
    assert scored(tests, fenced("import json\nprint(1)")) == [1.0]


def test_the_last_block_of_python_is_the_program():
    assert program_of("```py\na\n```\n```python\nb\n```\nIt prints:\n```\n3\n```") == "b\n"
    assert program_of("```\na\n```\n```\nb\n```\n```json\n{}\n```") == "b\n"
    assert program_of("```json\n{}\n```") is None and program_of("```python\nnot closed") is None
    assert program_of("") is None and program_of("``````\n```") is None


@pytest.mark.parametrize(
    ("tests", "said"),
    [
        (None, "has no 'tests'"),
        ([], "is empty"),
        ("", "expected code or input and output"),
        ("[1, 2", "is not valid JSON"),
        ([{"input": "1"}], "holds dict"),
        ([3], "holds int"),
        ({"fn_name": "f", "inputs": ["[1]"], "outputs": [1]}, "an 'input' that is no list of arguments"),
        ({"inputs": [1], "outputs": []}, "has not as many 'outputs' as 'inputs'"),
        ({"input": ["1", "2"], "output": ["3"]}, "has not as many 'output' as 'input'"),
        ([{"input": "1", "output": None}], "has a test whose 'output' is null"),
        ([{**FUNCTIONAL, "metadata": {"func_name": None}}], "without metadata.func_name or fn_name"),
        ([{**FUNCTIONAL, "input": "1\nx"}], "a test of testtype 'functional' that is not JSON"),
        # No program could pass these.
        (["assert f(1) == 2", "assert f(2) === 3"], "a test that is not Python: invalid syntax"),
        ("return f(1) == 2", "a test that is not Python: 'return' outside function"),
        (
            {"fn_name": "Solution.add", "inputs": [[1]], "outputs": [1]},
            "fn_name='Solution.add' is not the name",
        ),
        ({"fn_name": "f", "inputs": [[date(2026, 1, 1)]], "outputs": [1]}, "cannot be written as JSON"),
        ({"fn_name": "f", "inputs": [[1]], "outputs": [date(2026, 1, 1)]}, "cannot be written as JSON"),
        # Any program would pass these.
        ("46", "asserts and calls nothing"),
        (['{"input": "3", "output": "6"}'], "asserts and calls nothing"),
        ({"test_cases": '[{"input": "3", "output": "6"}]'}, "asserts and calls nothing"),
        ("result == 6", "asserts and calls nothing"),
        (["import math", "assert f(1) == 2"], "asserts and calls nothing"),
        (HUMAN_EVAL, "asserts and calls nothing"),
        ("class A:\n    pass\nif __name__ == '__main__':\n    A().run()", "asserts and calls nothing"),
    ],
)
def test_rows_without_tests_are_refused(tests, said):
    assert said in row_problem("code", {} if tests is None else {"tests": tests})


def test_rows_as_other_data_sets_have_them():
    for tests in (
        ["assert f(1) == 2"],
        "assert f(1) == 2",
        '[{"input": "1", "output": "2"}]',
        {"language": "python", "test_cases": [{"input": "1", "output": "2", "type": "stdin_stdout"}]},
        {"inputs": [["1", "2"]], "outputs": ["3"]},
        HUMAN_EVAL + "\ncheck(f)",
        "expected = f(1)",
        "for n in (1, 2):\n    assert f(n) == n",
        'assert f("\\d") == (1, "always true, and a warning")',
    ):
        assert row_problem("code", {"tests": tests}) is None
    assert row_problem(RewardSpec("code", options={"column": "checks"}), {"checks": "assert True"}) is None
    # What is not run need not be a test.
    first = RewardSpec("code", options={"max_tests": 1})
    assert row_problem(first, {"tests": ["assert f(1) == 2", "import math"]}) is None
    # As verl's are.
    inner = RewardSpec("code", options={"column": "reward_model.ground_truth"})
    assert (
        row_problem(inner, {"reward_model": {"ground_truth": '{"inputs": ["1"], "outputs": ["2"]}'}}) is None
    )
    for row in ({}, {"reward_model": "text"}, {"reward_model": {}}):
        assert "has no 'reward_model.ground_truth'" in row_problem(inner, row)


def test_a_machine_that_cannot_limit_code_is_named_before_the_first_step(monkeypatch):
    monkeypatch.setattr("shardproof.environments.sandbox.sys.platform", "darwin")
    with pytest.raises(ConfigError, match="reward 'code' cannot be limited on this machine: it needs Linux"):
        find_reward("code")


def test_a_run_scores_programs_beside_others_and_nothing_is_left(nothing_left):
    right, endless = fenced("print(int(input()) * 2)"), fenced("while True: pass")
    samples = [
        ("", said, {"tests": DOUBLE[:2], "completion_ids": [1]}) for said in (right, endless, "no program")
    ]
    specs = [RewardSpec("code", options={"timeout_s": 3.0}), RewardSpec("length", 0.5, options={"target": 1})]
    # The program's own limits count, not that of a call.
    with RewardRunner(specs, timeout_s=0.5) as runner:
        scored = runner.score(samples)
    assert [one.errors for one in scored] == [()] * 3
    assert [one.total for one in scored] == [1.5, 0.5, 0.5]
    assert [one.facts["code/timeouts"] for one in scored] == [0.0, 1.0, 0.0]
    assert [one.facts["code/no_program"] for one in scored] == [0.0, 0.0, 1.0]
