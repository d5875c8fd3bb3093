"""The log of requests that fail: a client must not fill the broker's disk."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from moolink.internal import logs
from moolink.internal.shown import cut, printable

AT_ONCE = 16  # lines, then one a second: as for unauthenticated peers (rpc/log_limit.h)


class Limit:
    """Leaves lines out when there are too many; the next line counts them."""

    def __init__(self) -> None:
        self._lines = AT_ONCE
        self._left_out = 0
        self._last = time.monotonic()

    def line(self, text: str, now: float | None = None) -> str | None:
        """The line to log now; None: it is left out."""
        now = time.monotonic() if now is None else now
        earned = int(now - self._last)
        if earned >= 1:
            self._lines, self._last = min(self._lines + earned, AT_ONCE), now
        if self._lines == 0:
            self._left_out += 1
            return None
        self._lines -= 1
        others, self._left_out = self._left_out, 0
        return f"{text} ({others} before it are not logged)" if others else text


class ServerLog(logging.Logger):
    """Receives the log records of aiohttp and of its event loop about requests.

    A fault of the client takes one line. Any other exception is a fault of the dashboard, and is
    logged with its traceback.
    """

    def __init__(self) -> None:
        super().__init__("moolink.dashboard")
        self._limit = Limit()

    def exception(self, msg: object, *args: object, **options: Any) -> None:
        """Logs an exception."""
        error = options.get("exc_info")
        self._log_fault(str(msg) % args if args else str(msg), error)

    def of_loop(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """The event loop's handler of exceptions."""
        self._log_fault(str(context.get("message")), context.get("exception"))

    def _log_fault(self, what: str, error: object) -> None:
        of_client = isinstance(
            error, HttpProcessingError | web.RequestPayloadError | ConnectionError
        )
        reason = f": {type(error).__name__}: {error}" if isinstance(error, Exception) else ""
        text = self._limit.line(printable(cut(f"dashboard: {what}{reason}", 400)))
        if text is not None:
            traced = error if isinstance(error, Exception) and not of_client else None
            logs.logger.warning("%s", text, exc_info=traced)
