"""Lines of samples.jsonl as runs with an environment write them, made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.report.folders import add_events, make_run, proof, write_lines

TOOLS = '# Tools\n{"name": "multiply", "parameters": {"a": "integer", "b": "integer"}}'


def segment(author: str, text: str, tokens: int, **more: Any) -> dict[str, Any]:
    return {"author": author, "text": text, "tokens": tokens, "trained": author == "policy", **more}


def turn(number: int, text: str, tokens: int, reward: float = 0.0, **more: Any) -> dict[str, Any]:
    more = {"version": 3, "advantage": 0.8, **more}
    return segment("policy", text, tokens, turn=number, reward=reward, **more)


def replied(text: str) -> list[dict[str, Any]]:
    """A tool's answer between two turns, with the template's tokens around it."""
    return [
        segment("template", "\n<|im_start|>user\n<tool_response>\n", 7),
        segment("environment", text, 4),
        segment("template", "\n</tool_response><|im_end|>\n<|im_start|>assistant\n", 9),
    ]


def call_text(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call><|im_end|>'


def opening(question: str) -> dict[str, Any]:
    text = f"<|im_start|>system\n{TOOLS}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return segment("prompt", text, 96)


def line(step: int, sample: int, question: str, reward: float, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "group": 0,
        "sample": sample,
        "prompt": question,
        "completion": "as the rewards read it",
        "reward": reward,
        "rewards": {"environment": reward},
        "advantage": 0.8 if reward > 0 else -0.8,
        **more,
    }


def solved(step: int, question: str, a: int, b: int) -> dict[str, Any]:
    arguments = f'{{"a": {a}, "b": {b}}}'
    call = {"name": "multiply", "arguments": arguments, "answer": str(a * b), "failed": False}
    segments = [opening(question), turn(1, call_text("multiply", arguments), 31, 0.2, calls=[call])]
    segments += [*replied(str(a * b)), turn(2, f"The answer is {a * b}.<|im_end|>", 9, 1.0)]
    return line(step, 0, question, 1.2, ended="done", segments=segments)


def lost(step: int, question: str, b: int) -> dict[str, Any]:
    """A call of a tool that is not there, text that is no call, and no turn left."""
    error = "Error: there is no tool 'multiplyy'. Tools: multiply. Did you mean 'multiply'?"
    call = {"name": "multiplyy", "arguments": '{"a": 12}', "answer": error, "failed": True}
    segments = [
        opening(question),
        turn(1, call_text("multiplyy", '{"a": 12}'), 29, -0.1, advantage=-0.8, calls=[call]),
        *replied(error),
        turn(
            2,
            f"<tool_call>\nmultiply 12 {b}<|im_end|>",
            14,
            -0.1,
            advantage=-0.8,
            malformed=["the call is not JSON: expected an object"],
        ),
    ]
    return line(step, 1, question, -0.2, ended="turns", segments=segments)


def failed(step: int, question: str) -> dict[str, Any]:
    segments = [opening(question), turn(1, "I do not know.<|im_end|>", 6, trained=False)]
    error = "TimeoutError: no answer in 30 s"
    return line(step, 2, question, 0.0, ended="failed", error=error, segments=segments)


def split(step: int, question: str) -> dict[str, Any]:
    """A template that drops the first turn's thought: two sequences."""
    segments = [
        opening(question) | {"sequence": 1},
        turn(1, "<think>shall I guess?</think>81<|im_end|>", 12, sequence=1),
        segment("prompt", f"<|im_start|>user\n{question}<|im_end|>81<|im_end|>\nTry again.", 40, sequence=2),
        turn(2, "<think>then 84</think>84<|im_end|>", 11, 1.0, sequence=2),
    ]
    return line(step, 3, question, 1.0, ended="done", segments=segments)


def make_talks(folder: Path, num_steps: int = 4) -> Path:
    """A run with conversations in which everything happens once per step."""
    make_run(folder)
    lines = []
    for step in range(1, num_steps + 1):
        question = f"What is 12 times {step + 6}?"
        group = [solved(step, question, 12, step + 6), lost(step, question, step + 6)]
        group += [failed(step, question), split(step, question)]
        group[0] |= {"group_rewards": [1.2, -0.2, None, 1.0], "answer": str(12 * (step + 6))}
        lines += group
    write_lines(folder / "samples.jsonl", lines)
    details = {"tokens": 230, "trained": 218, "turns": 7, "conversations": 4}
    add_events(folder, proof("tokens", 1, details=details), proof("tokens", 4, details=details))
    return folder
