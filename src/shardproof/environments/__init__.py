"""Environments: what answers the policy's turns. Free of torch; workers may run under another Python interpreter."""
