"""A game of several turns for verifiers: its environment plays the user, and tells more after each guess."""

import itertools

import verifiers.v1 as vf

__all__ = ["GuessEnv", "GuessTaskset"]


class GuessData(vf.TaskData):
    secret: int


class GuessTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    pass


class GuessEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessEnvConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and segment.last_reply != str(task.data.secret):
                guess = segment.last_reply
                hint = "higher" if guess.isdigit() and int(guess) < task.data.secret else "lower"
                segment = await interaction.turn(hint)
        found = not segment.terminated
        interaction.trace.record_reward("found", float(found), 1.0)
        interaction.trace.record_metric("guesses", interaction.trace.num_turns)


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for number in itertools.count():
            yield GuessTask(
                GuessData(prompt=f"Guess a number. {number}", secret=number % 10), self.config.task
            )
