"""How much memory a run takes, before anything is allocated: one model, a rollout engine, a whole recipe."""
