"""`shardproof train --dry-run`: what would stop a start, and nothing written."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

from shardproof.cli.options import UNUSABLE, Options
from shardproof.cli.readiness import count_ranks, look_ahead
from shardproof.errors import ShardproofError
from shardproof.terminal import Terminal
from shardproof.text import printable

if TYPE_CHECKING:
    from shardproof.config.schema import Recipe

logger = logging.getLogger(__name__)


def dry_run(recipe: Recipe, options: Options, terminal: Terminal) -> None:
    """Show what would start, then everything that would stop it, then the verdict. Nothing is written."""
    from shardproof.dist.start import node_range
    from shardproof.rl.checks import check_inputs, check_model, describe_ahead
    from shardproof.rl.judge_checks import check_judges
    from shardproof.rl.models import check_contexts
    from shardproof.rl.place import check_content, check_folder
    from shardproof.rl.same_run import Resume

    logger.info("checking this machine ...")
    num_nodes, num_ranks = node_range(options.nnodes)[0], count_ranks(recipe)
    resume = Resume(options.allow, options.from_step)
    findings = look_ahead(recipe, options)
    ranks = f"{num_ranks} rank{'s' * (num_ranks > 1)}"
    facts = [f"{num_nodes} x {ranks}" if num_nodes > 1 else ranks]
    if (ahead := describe_ahead(recipe.rollout)) is not None:
        facts.append(ahead)
    try:
        logger.info("reading the data ...")
        inputs = check_inputs(recipe)
        facts = [f"{len(inputs.prompts)} prompts, {sum(map(len, inputs.held_out.values()))} held out", *facts]
        logger.info("comparing the model's files with its config ...")
        check_model(recipe, inputs.config, num_nodes * num_ranks)
        check_judges(recipe, inputs.tokenizer)
        check_contexts(recipe, inputs)
        state = check_folder(recipe, resume)
        check_content(state, recipe, inputs.prompts, inputs.held_out, resume)
    except ShardproofError as error:
        findings += [finding for finding in error.findings if finding not in findings]
    terminal.pause()
    if not options.quiet:
        terminal.show("\n".join(_changed(recipe)))
    if findings:
        terminal.show("\n".join(map(str, findings)))
        raise SystemExit(UNUSABLE)
    terminal.show(f"{'; '.join(facts)}; nothing is wrong")


def _changed(recipe: Recipe) -> list[str]:
    """The settings that are not at their defaults, one per line."""
    from shardproof.config.defaults import differences_from_defaults

    changed = differences_from_defaults(recipe).items()
    return ["Settings that differ from their defaults:"] + [
        printable(f"  {key} = {json.dumps(each['value'])}") for key, each in changed
    ]
