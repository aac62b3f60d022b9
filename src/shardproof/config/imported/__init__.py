"""Configs of other libraries, read into recipes."""
