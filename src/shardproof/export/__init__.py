"""From shards to a stream of checkpoint tensors, to shared memory and to Hugging Face folders."""
