"""What completions are worth: reward functions, the processes that run them, and what becomes of their values."""
