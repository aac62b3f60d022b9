"""An MCP server for the tests: `python mcp_server.py NAME` on stdin and stdout, with a port on streamable HTTP."""

import os
import sys
import time

from mcp.server.mcpserver import Image, MCPServer

server = MCPServer(sys.argv[1])
count = 0


@server.tool()
def add(x: int, y: int = 1) -> int:
    """Add two numbers."""
    return x + y


@server.tool()
def next_number() -> str:
    """Count on."""
    global count
    count += 1
    return f"{sys.argv[1]} {count}"


@server.tool()
def refuse(why: str) -> str:
    """Raise an error."""
    raise ValueError(why)


@server.tool()
def draw() -> list:
    """Return text and a picture."""
    return ["a dot:", Image(data=b"\x89PNG", format="png")]


@server.tool()
def flood(size: int) -> str:
    """Return much text."""
    return "x" * size


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(1)


@server.tool()
def hang() -> str:
    """Never come back."""
    time.sleep(600)
    return "late"


@server.tool()
def variable(name: str) -> str:
    """Tell an environment variable."""
    return os.environ.get(name, "none")


if __name__ == "__main__":
    if len(sys.argv) > 3:  # a file that says whether the server may start
        with open(sys.argv[3]) as file:
            if file.read() == "no":
                sys.exit("the server may not start")
    if sys.argv[2:3] not in ([], ["-"]):
        server.run("streamable-http", port=int(sys.argv[2]), host="127.0.0.1")
    else:
        server.run("stdio")
