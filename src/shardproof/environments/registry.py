"""The environments that come with the package, by the names that recipes use."""

from __future__ import annotations

from shardproof.errors import did_you_mean, fail
from shardproof.user_code import is_user_name

BUILT_IN = {
    "tools": "shardproof.environments.tools:Tools",
    "reasoning_gym": "shardproof.environments.from_reasoning_gym:ReasoningGym",
    "verifiers": "shardproof.environments.from_verifiers:Verifiers",
    "openenv": "shardproof.environments.from_openenv:OpenEnv",
}


def resolve(name: str) -> str:
    """The class or function that `environment.name` stands for, as module:name."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if is_user_name(name):
        return name
    message = f"environment {name!r} is not one of {', '.join(BUILT_IN)}, or module:name."
    fix = "name a built-in environment, or your own class as module:name"
    raise fail("C001", "environment", message + did_you_mean(name, BUILT_IN), fix=fix)
