"""Hugging Face configs to meta modules, and facts about them."""
