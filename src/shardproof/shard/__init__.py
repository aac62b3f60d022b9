"""From a skeleton to shards that are written and proved."""
