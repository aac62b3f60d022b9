"""Conversations as tokens: chat templates, the tokens of replies, and what the policy's turns say."""
