"""An OpenEnv server, as users write them: `python game_server.py PORT_FILE` serves on a free port until it is killed."""

import os
import socket
import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class GuessAction(Action):
    message: str


class GuessObservation(Observation):
    text: str
    left: int = 3


class Guess(Environment[GuessAction, GuessObservation, State]):
    """A number from 0 to 9 that follows from the seed is to be guessed in three turns."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, secret=None, **_):
        self.secret, self.left = (seed or 0) % 10 if secret is None else secret, 3
        return GuessObservation(text="Guess a number from 0 to 9.", left=3)

    def step(self, action, timeout_s=None, **_):
        if action.message == "die":
            os._exit(1)
        if action.message == "raise":
            raise RuntimeError("cannot do that")
        self.left -= 1
        if action.message == str(self.secret):
            return GuessObservation(text="right", left=self.left, reward=1.0, done=True)
        return GuessObservation(text="wrong", left=self.left, reward=-0.1, done=self.left == 0)

    @property
    def state(self):
        return State(step_count=3 - self.left)


class Shop(MCPEnvironment):
    """The price of an item can be looked up with a tool. A lookup is worth something, and that of "all" ends it."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        tools = FastMCP("shop")

        @tools.tool
        def price(item: str) -> str:
            """The price of an item."""
            return str(len(item) * 10)

        super().__init__(tools)

    def reset(self, seed=None, episode_id=None, **_):
        return Observation()

    def step(self, action, timeout_s=None, **_):
        return self._scored(action, super().step(action, timeout_s=timeout_s))

    async def step_async(self, action, timeout_s=None, **_):
        return self._scored(action, await super().step_async(action, timeout_s=timeout_s))

    def _step_impl(self, action, timeout_s=None, **_):
        return Observation()

    def _scored(self, action, seen):
        if isinstance(action, CallToolAction):
            seen.reward, seen.done = 0.5, action.arguments.get("item") == "all"
        return seen

    @property
    def state(self):
        return State()


def main(port_file, kind):
    listening = socket.create_server(("127.0.0.1", 0))
    if kind == "shop":
        app = create_fastapi_app(Shop, CallToolAction, CallToolObservation, max_concurrent_envs=64)
    else:
        app = create_fastapi_app(Guess, GuessAction, GuessObservation, max_concurrent_envs=64)
    config = uvicorn.Config(app, log_level="error", ws="websockets-sansio")
    with open(f"{port_file}.new", "w") as file:
        file.write(str(listening.getsockname()[1]))
    os.rename(f"{port_file}.new", port_file)
    uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main(*sys.argv[1:])
