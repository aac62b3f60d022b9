"""From a sharded model and a batch to one update, or to none, on every rank alike."""
