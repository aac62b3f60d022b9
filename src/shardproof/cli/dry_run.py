"""`shardproof train --dry-run`: what would stop a start, and nothing written."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from shardproof.cli.options import UNUSABLE, Options
from shardproof.cli.readiness import count_ranks, look_ahead
from shardproof.errors import ShardproofError

if TYPE_CHECKING:
    from shardproof.config.schema import Recipe


def dry_run(recipe: Recipe, options: Options) -> None:
    """Print the resolved recipe, then everything that would stop its start. Nothing is written."""
    from shardproof.config.load import to_json
    from shardproof.dist.launch import node_range
    from shardproof.rl.checks import check_inputs, check_model
    from shardproof.rl.place import check_content, check_folder
    from shardproof.rl.same_run import Resume

    print(to_json(recipe), flush=True)
    num_nodes, num_ranks = node_range(options.nnodes)[0], count_ranks(recipe)
    resume = Resume(options.allow, options.from_step)
    findings = look_ahead(recipe, options)
    summary = ""
    try:
        inputs = check_inputs(recipe)
        summary = f"{len(inputs.prompts)} prompts, {len(inputs.held_out)} held out; "
        check_model(recipe, inputs.config, num_nodes * num_ranks)
        state = check_folder(recipe, resume)
        check_content(state, recipe, inputs.prompts, inputs.held_out, resume)
    except ShardproofError as error:
        findings += [finding for finding in error.findings if finding not in findings]
    if findings:
        print(*findings, sep="\n", file=sys.stderr)
        raise SystemExit(UNUSABLE)
    print(f"{summary}{num_nodes} x {num_ranks} ranks; nothing is wrong", file=sys.stderr)
