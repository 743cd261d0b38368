"""The object of `edge-agent status --json`, which scripts and Ansible read."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

from tests.fakes.fleet import running_fleet

GOLDEN = Path(__file__).parents[1] / "golden" / "agent_status.txt"

OF_THE_MACHINE = ("health.", "energy.", "memory.", "requests.", "models[].", "uptime_seconds")
"""What is known there, and whether a number has a fraction, depends on it."""


def paths_of(value: object, path: str = "") -> Iterator[str]:
    """Each leaf with its type, in the order of the object; of a list its first element."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from paths_of(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value:
        yield from paths_of(value[0], f"{path}[]")
    elif path.startswith(OF_THE_MACHINE):
        yield path
    else:
        yield f"{path} {type(value).__name__}"


def test_status_of_a_running_agent_has_the_keys_that_scripts_know(tmp_path: Path) -> None:
    """Adding a key adds a line; changing or dropping one breaks somebody's script."""

    async def scenario() -> list[str]:
        async with running_fleet(tmp_path) as fleet:
            agent = await fleet.add_agent("pi")
            await fleet.infer()
            return list(paths_of(await agent.status()))

    found = asyncio.run(scenario())
    assert found == GOLDEN.read_text(encoding="utf-8").splitlines()
