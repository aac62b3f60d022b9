"""Conversations of the policy with an environment: turns, limits, and what is trained on."""
