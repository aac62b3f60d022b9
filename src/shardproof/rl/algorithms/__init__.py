"""Algorithms: which advantages, which loss, which weights. Each is a class; a new one is one file."""
