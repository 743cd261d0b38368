"""A TCP proxy that delays and throttles what passes, like a poor link."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_PIECE_BYTES = 2048


@asynccontextmanager
async def slow_link(
    target: str, delay_seconds: float, bytes_per_second: float
) -> AsyncIterator[str]:
    """The address of a proxy to `target`; every byte is late, and no faster than that each way."""
    host, _, port = target.rpartition(":")
    tasks: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(host, int(port))
        for source, sink in ((reader, there_writer), (there_reader, writer)):
            task = asyncio.create_task(_pass_on(source, sink, delay_seconds, bytes_per_second))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pass_on(
    source: asyncio.StreamReader,
    sink: asyncio.StreamWriter,
    delay_seconds: float,
    bytes_per_second: float,
) -> None:
    loop = asyncio.get_running_loop()
    free_at = 0.0
    try:
        while data := await source.read(_PIECE_BYTES):
            # The line is free again when all before has passed; the delay does not add up.
            free_at = max(free_at, loop.time()) + len(data) / bytes_per_second
            await asyncio.sleep(max(free_at - loop.time(), 0.0))
            loop.call_later(delay_seconds, sink.write, data)
    except ConnectionError:
        pass
    finally:
        with contextlib.suppress(ConnectionError):
            loop.call_later(2 * delay_seconds, sink.close)
