"""Chat templates: how messages become tokens, and tokens become messages and tool calls."""
