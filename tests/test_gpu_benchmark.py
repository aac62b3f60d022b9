"""benchmarks/gpu.py: the same work for every engine, bars that the worst case decides, rows of other runs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu, gpu_peers, gpu_vllm
from benchmarks.gpu_cases import make_prompts, measure_engine, tail_lengths
from benchmarks.gpu_merge import WORKLOAD, CannotMerge, take_over
from benchmarks.gpu_ours import OURS
from benchmarks.gpu_report import judge, print_results
from benchmarks.gpu_timing import SavedRows
from benchmarks.gpu_workload import PROMPTS, RL, ROWS, TAILS, TINY


def options(*arguments: str) -> argparse.Namespace:
    parser = gpu.make_parser()
    parser.set_defaults(**TINY)
    return parser.parse_args(["--tiny", *arguments])


def test_tails_have_their_mean_and_their_longest_and_are_always_the_same():
    for num in (64, 256, 512):
        lengths = tail_lengths(num, 300, 2048)
        assert lengths == tail_lengths(num, 300, 2048) and len(lengths) == num
        assert max(lengths) == 2048 and min(lengths) >= 1
        assert 240 < sum(lengths) / num < 360
    prompts = make_prompts(64, 8, 1000)
    assert len(set(map(tuple, prompts))) == 64 and prompts[:3] == make_prompts(3, 8, 1000)


def test_every_case_is_saved_at_once_and_wrong_lengths_are_refused(tmp_path: Path):
    asked: list[list[int]] = []

    def generate(prompts: Any, limits: Any) -> list[int]:
        asked.append(list(limits))
        return list(limits)

    file = tmp_path / "rows.json"
    measure_engine(generate, "some", [ROWS, TAILS, PROMPTS], options(), SavedRows(file))
    found = json.loads(file.read_text())
    assert {part: list(found[part]["some"]) for part in found} == {
        ROWS: ["1", "3"],
        TAILS: ["5"],
        PROMPTS: ["2 x 8", "2 x 40"],
    }
    assert tail_lengths(5, 6, 20) in asked and [6, 6, 6] in asked
    with pytest.raises(AssertionError):
        measure_engine(lambda _, limits: [9] * len(limits), "some", [TAILS], options(), SavedRows(file))


def results(*names: str) -> dict[str, Any]:
    settings = json.loads(json.dumps(vars(options())))
    found: dict[str, Any] = {"settings": settings, "machine": {}, "errors": {}, "seconds": {}, "merged": []}
    for name, step_s, tokens_per_s in (
        (OURS, 0.002, 12000.0),
        (gpu_vllm.VLLM, 0.003, 9000.0),
        (gpu_vllm.VLLM_APART, 0.0023, 9900.0),
    ):
        if name in names:
            found.setdefault(ROWS, {})[name] = {"32": {"step_s": step_s}, "64": {"step_s": 2 * step_s}}
            found.setdefault(TAILS, {})[name] = {"256": {"tokens_per_s": tokens_per_s}}
    return found


def test_bars_are_held_against_the_faster_of_vllms_rows(capsys: pytest.CaptureFixture[str]):
    found = results(OURS, gpu_vllm.VLLM, gpu_vllm.VLLM_APART)
    bars = judge(found)
    assert bars["equal lengths: at least 1.2 times as fast as vLLM at 64 rows"] == "MISSED (1.15)"
    assert bars["long tails: at least 1.2 times vLLM's tokens/s with 256 completions"] == "met (1.21)"
    assert bars["prompts: at least 1 times as fast as vLLM, all tokens"] == "not measured"
    print_results(found)
    assert "times as fast as vLLM" in capsys.readouterr().out


def test_rows_of_another_run_stand_beside_ours_with_where_they_come_from():
    ours, peers = results(OURS), results(gpu_vllm.VLLM)
    peers |= {"environment": {"commit": "abc", "vllm": "0.26.0"}}
    peers[RL] = {gpu_peers.GRPO_VLLM: {"step_s": 3.0}}
    take_over(peers, ours, "peers.json")
    assert list(ours[ROWS]) == [OURS, gpu_vllm.VLLM] and RL in ours
    (source,) = ours["merged"]
    assert source["environment"]["vllm"] == "0.26.0" and source["file"] == "peers.json"
    assert source["rows"] == {ROWS: [gpu_vllm.VLLM], TAILS: [gpu_vllm.VLLM], RL: [gpu_peers.GRPO_VLLM]}
    assert judge(ours)["equal lengths: at least 1.2 times as fast as vLLM at 32 rows"] == "met (1.5)"


def test_rows_of_other_work_are_refused():
    ours, peers = results(OURS), results(gpu_vllm.VLLM)
    peers["settings"]["row_steps"] = 512
    with pytest.raises(CannotMerge, match=r"peers.json measured 'rows' with row_steps = 512.*--row-steps"):
        take_over(peers, ours, "peers.json")
    assert gpu_vllm.VLLM not in ours[ROWS]


def test_every_part_says_what_two_runs_must_have_in_common():
    assert set(WORKLOAD) == set(gpu.PARTS)
    settings = vars(options())
    assert all(key in settings for keys in WORKLOAD.values() for key in keys)


def test_peers_are_chosen_and_left_out(capsys: pytest.CaptureFixture[str]):
    def names(*arguments: str) -> list[str]:
        return [contender.name for contender, _ in gpu.chosen(options("--parts", RL, ROWS, *arguments))]

    assert names("--no-peers") == [OURS, OURS]
    assert all(name.startswith("TRL") for name in names("--peers-only"))
    assert "vLLM is left out" in capsys.readouterr().out
