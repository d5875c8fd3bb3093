"""A TCP relay that does to connections what networks do: delay, a rate, losing them, partitions."""

from __future__ import annotations

import asyncio
import threading
import time

_PIECE = 64 << 10


class Relay:
    """Forwards connections to one address, from a thread of its own.

    Args:
        host: of the address that is forwarded to.
        port: of the same.
        delay: seconds that each byte takes in each direction.
        rate: bytes a second of each connection in each direction; ``None`` is no limit.
    """

    def __init__(
        self, host: str, port: int, *, delay: float = 0.0, rate: float | None = None
    ) -> None:
        self._target = (host, port)
        self._delay = delay
        self._rate = rate
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._whole = asyncio.Event()  # clear while the network is partitioned
        self._whole.set()
        self.accepted = 0
        self._server = self._loop.run_until_complete(
            asyncio.start_server(self._serve, "127.0.0.1", 0)
        )
        self.address = "{}:{}".format(*self._server.sockets[0].getsockname())
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self._writers.add(writer)
        await self._whole.wait()
        try:
            there, back = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers.add(back)
        await asyncio.gather(self._forward(reader, back), self._forward(there, writer))

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(1024)
        sending = asyncio.ensure_future(self._deliver(under_way, writer))
        try:
            while piece := await reader.read(_PIECE):
                self.carried(piece)
                if self._rate is not None:
                    await asyncio.sleep(len(piece) / self._rate)
                await under_way.put((time.monotonic() + self._delay, piece))
        except OSError:
            writer.transport.abort()  # the other side is told in the same way
        await under_way.put((0.0, b""))
        await sending

    async def _deliver(
        self, under_way: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter
    ) -> None:
        while True:
            due, piece = await under_way.get()
            if not piece:
                break
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            await self._whole.wait()
            if writer.is_closing():
                continue  # what is read from now on has nowhere to go
            writer.write(piece)
            try:
                await writer.drain()
            except OSError:
                writer.transport.abort()
        writer.close()
        self._writers.discard(writer)

    def carried(self, piece: bytes) -> None:
        """Told of what passes, in its thread; for who wants to look at it."""

    def _call(self, function: object) -> None:
        done = threading.Event()

        def run() -> None:
            assert callable(function)
            function()
            done.set()

        self._loop.call_soon_threadsafe(run)
        done.wait()

    def drop_connections(self) -> None:
        """Resets every connection that there is; new ones are accepted."""

        def drop() -> None:
            for writer in self._writers:
                writer.transport.abort()
            self._writers.clear()

        self._call(drop)

    def cut(self) -> None:
        """Partitions the network: nothing arrives any more, and nobody is told."""
        self._call(self._whole.clear)

    def mend(self) -> None:
        """Ends the partition: what was under way arrives late."""
        self._call(self._whole.set)

    def close(self) -> None:
        """Resets what is open and stops listening."""
        self.drop_connections()

        async def end() -> None:
            self._server.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
