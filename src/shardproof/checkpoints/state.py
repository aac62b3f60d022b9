"""The old place of two names, until those who import them from here have moved."""

from shardproof.checkpoints.resume import resume as resume
from shardproof.checkpoints.save import save_checkpoint as save_checkpoint
