"""From shards to a stream of checkpoint tensors, to folders, and to checkpoints that any layout can read."""
