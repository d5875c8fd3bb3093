"""Access to the dashboard: open on loopback, with a key elsewhere."""

from __future__ import annotations

import hmac

from moolink.internal.addresses import is_loopback

COOKIE = "moolink-dashboard"


class Access:
    """Decides whether a request is answered.

    Args:
        key: the dashboard's key (`moolink.tokens.Key.dashboard`); None: on loopback, where
            no key is asked for, but a page of another site may not read the dashboard through the
            browser by a name of its own for 127.0.0.1 (DNS rebinding).
    """

    def __init__(self, key: str | None) -> None:
        self._key = key

    def accepts_host(self, host: str) -> bool:
        """Whether the request's Host header may be answered."""
        if self._key is not None:
            return True
        name = host.rpartition(":")[0] if ":" in host.rpartition("]")[2] else host
        return is_loopback(name.lower())

    def accepts(self, authorization: str, cookie: str) -> bool:
        """Whether one of the two has the key."""
        if self._key is None:
            return True
        scheme, _, given = authorization.partition(" ")
        return self.is_key(given if scheme.lower() == "bearer" else cookie)

    def is_key(self, given: str) -> bool:
        """Whether this is the key; takes as long for any other text."""
        return self._key is not None and hmac.compare_digest(
            given.strip().encode(errors="surrogateescape"), self._key.encode()
        )
