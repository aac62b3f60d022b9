"""Runs on several hosts, which are made of namespaces on this machine."""
