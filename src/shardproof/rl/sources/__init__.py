"""Where prompts come from: readers of files and of the hub, checks of rows, tokens, mixtures, and pools by difficulty."""
