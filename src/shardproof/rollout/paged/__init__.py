"""Decoding with a paged cache: rows enter and leave while others go on."""
