"""Hugging Face weight files: where they are, what is in them, which bytes a parameter needs, how a folder is replaced."""
