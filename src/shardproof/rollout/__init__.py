"""Rollout engines: completions for prompts, and weights that are known to have arrived."""
