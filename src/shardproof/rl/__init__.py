"""Reinforcement learning on a sharded model: data, rewards, advantages, and the loop."""
