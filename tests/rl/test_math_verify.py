"""math-verify as a reward: the real package, in the workers."""

import sys

import pytest

from shardproof.errors import ConfigError
from shardproof.rl.rewards.answers import math_verify
from shardproof.rl.rewards.calling import Outcome, attempt
from shardproof.rl.rewards.functions import CANNOT_HANG, find_reward, row_problem
from shardproof.rl.rewards.runner import RewardRunner, RewardSpec


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        ("1/2", r"so it is $\frac{1}{2}$", "2"),
        (0.5, r"\boxed{\frac12}", r"\boxed{5}"),
        (r"3\pi", r"The area is $3\pi$.", "3"),
        (r"\frac{3}{4}", "0.75", "3"),
        (r"\sqrt{2}", r"$\sqrt 2$", "2"),
        ("x^2+1", "$1+x^2$", "$x^2$"),
        ("1e-05", "0.00001", "1"),
        ("5 dollars", "That is 5", "That is 6"),
        ("#### 42", "42", "#### 41"),
        ("$x=3$", "x = 3", "x = 4"),
        (
            r"\begin{pmatrix} 1 & -2 \\ 0 & 3 \end{pmatrix}",
            r"\boxed{\begin{pmatrix} 1 & -2 \\[2pt] 0 & 3 \end{pmatrix}}",
            "3",
        ),
        (r"\begin{array}{cccc} 1 & 3 \end{array}", r"$\begin{array}{cccc} 1 & 3 \end{array}$", "3"),
        (r"\text{no solution}", r"\boxed{\text{no solution}}", r"\boxed{\text{many}}"),
        (r"\text{June 20}", r"\boxed{\text{June 20}}", r"\boxed{20}"),
        ("True", r"\boxed{True}", r"\boxed{False}"),
        ("no solution", r"\boxed{\text{no solution}}", r"\boxed{many}"),
        ("even", r"$\text{even}$", r"\boxed{odd}"),
        (r"\$32,348", r"\boxed{32348}", r"\boxed{\$32}"),
        ("2*sqrt(3)", r"$2\sqrt{3}$", "2"),
        (r"\{1,2\}", r"$\{2,1\}$", r"$\{2,3\}$"),
        # To six decimals they are all zero.
        ("1e-7", "0.0000001", "0.0"),
        (r"6.67 \times 10^{-11}", r"\boxed{6.67 \times 10^{-11}}", r"\boxed{0.0}"),
        (r"6.67 \times 10^{-11}", r"\boxed{0.0000000000667}", r"\boxed{0.0000000001}"),
        (r"\{10^{-7}, 3\}", r"\boxed{\{0.0000001, 3\}}", r"\boxed{\{0.0, 3\}}"),
        (
            r"\begin{pmatrix} 0.0000001 & 2 \end{pmatrix}",
            r"$\begin{pmatrix} 0.0000001 & 2 \end{pmatrix}$",
            r"$\begin{pmatrix} 0.0 & 2 \end{pmatrix}$",
        ),
        (r"\frac{1}{3}", "0.333333", "0.33"),
        (r"5\%", r"\boxed{5\%}", r"\boxed{6\%}"),  # which has no float
        (r"\infty", r"$\infty$", r"$-\infty$"),
    ],
)
def test_equal_mathematics_is_rewarded_however_it_is_written(answer, right, wrong):
    row = {"answer": answer}
    assert attempt(math_verify, ("", right, row)) == Outcome(1.0)
    assert attempt(math_verify, ("", wrong, row)) == Outcome(0.0)
    assert attempt(math_verify, ("", "I do not know", row)) == Outcome(0.0)


@pytest.mark.fault
def test_answers_that_are_no_mathematics_are_refused_or_recorded():
    assert row_problem("math_verify", {"answer": "7"}) is None
    assert row_problem("math_verify", {"answer": None}) == (
        "reward 'math_verify': the row's 'answer' is null; expected text or a number"
    )
    assert row_problem("math_verify", {"answer": " "}) == "reward 'math_verify': the row's 'answer' is empty"
    assert row_problem("math_verify", {}) == "reward 'math_verify': the row has no 'answer'"
    value, error, _ = attempt(math_verify, ("", "hello!", {"answer": "hello!"}))
    assert value == 0.0 and "finds no mathematics in the answer 'hello!'" in error


@pytest.mark.fault
def test_it_runs_in_workers_and_a_tower_of_powers_is_a_zero():
    assert "math_verify" not in CANNOT_HANG
    row = {"answer": "3"}
    samples = [("", text, row) for text in ("3", "$9^{9^{9^{9^9}}}$", "4")]
    with RewardRunner([RewardSpec("math_verify")], num_workers=1, timeout_s=30.0) as runner:
        scores = runner.score(samples)
    assert [score.total for score in scores] == [1.0, 0.0, 0.0]


@pytest.mark.fault
def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ConfigError, match=r"C001.*math_verify(.|\n)*pip install 'shardproof\[math\]'"):
        find_reward("math_verify")
