"""What can be known about the models beside the policy before any rank starts: their files and tokenizers."""

from __future__ import annotations

from typing import Any

from shardproof.config.schema import Recipe
from shardproof.model.inventory import take_inventory
from shardproof.model.roles import CRITIC, REFERENCE, REWARD, TEACHER
from shardproof.model.skeleton import build_skeleton
from shardproof.rl.checks import load_tokenizer, model_folder
from shardproof.rl.models import check_vocabularies
from shardproof.rl.reward_models import read_tokenizer
from shardproof.rl.teacher import require_same_vocabulary
from shardproof.shard.plan import plan_shards
from shardproof.weights.source import resolve_folder


def check_judges(recipe: Recipe, tokenizer: Any) -> None:
    """Raise if a model beside the policy lacks what it needs; `tokenizer` is the policy's. A server is not asked."""
    for role, section in ((REFERENCE, recipe.reference), (CRITIC, recipe.critic)):
        if section is not None and section.path is not None:
            _check_files(section.path, role, recipe.model.trust_remote_code)
    check_vocabularies(recipe, tokenizer)
    for each in recipe.reward.models if recipe.reward is not None else ():
        read_tokenizer(each)
        _check_files(each.path, REWARD, each.trust_remote_code)
    teacher = recipe.teacher
    if teacher is not None and teacher.path is not None:
        theirs = load_tokenizer(model_folder(teacher.path), teacher.trust_remote_code)
        require_same_vocabulary(tokenizer, theirs, teacher.path)
        _check_files(teacher.path, TEACHER, teacher.trust_remote_code)


def _check_files(path: str, role: str, trust_remote_code: bool) -> None:
    resolved = resolve_folder(path, model_folder(path), trust_remote_code)
    skeleton = build_skeleton(resolved.config, role=role, trust_remote_code=trust_remote_code)
    plan_shards(skeleton, take_inventory(skeleton.model), resolved.checkpoint, resolved.seed)
