"""``moolink doctor HOST:PORT``: how a broker or a peer is reached from here, by each path."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

import numpy as np

import moolink
from moolink import tokens
from moolink.errors import AuthError, Error, NoSuchFunction
from moolink.group.broker_peer import MEASURE

if TYPE_CHECKING:
    from moolink.reports import Explanation, PeerInfo

_TIMEOUT = 5.0  # seconds until a path is taken for one that does not connect
_BETTER = 1.0  # seconds until a path that is better than tcp is in use
_CALLS = 200
_BYTES = 16 << 20
_TURNS = 5


def obstacle(address: str, token_file: str | None) -> str | None:
    """Why HOST:PORT cannot be reached by any path; None if the port has a listener."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 1 << 16:
        return f"an address is HOST:PORT, got {address!r}"
    try:
        tokens.identity(token_file=token_file)
        socket.create_connection((host.strip("[]"), int(port)), _TIMEOUT).close()
    except (AuthError, ValueError) as error:
        return str(error)
    except socket.gaierror as error:
        return f"the name {host!r} is not known here: {error.strerror}"
    except TimeoutError:
        return (
            f"no answer within {_TIMEOUT:g} s: the machine is down, or a firewall drops packets "
            f"sent to port {port}"
        )
    except ConnectionRefusedError:
        return f"refused: the machine answers, but nothing listens on port {port} of that address"
    except OSError as error:
        return str(error)
    return None


def measure(address: str, path: str, token_file: str | None) -> tuple[bool, str]:
    """Connects, and uses one kind of path. Returns whether it can, and the measurement or the
    reason."""
    transports = [path] if path == "tcp" else [path, "tcp"]  # by which they meet
    try:
        with moolink.Rpc(transports=transports, timeout=_TIMEOUT, token_file=token_file) as rpc:
            return _measure(rpc, address, path)
    except (Error, ValueError) as error:
        return False, str(error)


def _measure(rpc: moolink.Rpc, address: str, path: str) -> tuple[bool, str]:
    rpc.connect(address)
    peer = _wait_for_peer(rpc)
    if peer is None:
        tried = [one["error"] for one in rpc.explain("broker")["tried"] if one["error"]]
        return False, tried[0] if tried else f"no peer answers at {address} within {_TIMEOUT:g} s"
    name = peer["name"]
    explained = _wait_for_path(rpc, name, path)
    if explained["path"] != path:
        reasons = [one["reason"] for one in explained["paths"] if one["path"] == path]
        return False, f"peer {name!r}: {reasons[0] if reasons else 'not offered'}"
    how = f"encrypted with {explained['cipher']}" if explained["cipher"] else "not encrypted"
    try:
        seconds = sorted(_call(rpc, name, b"") for _ in range(_CALLS))[_CALLS // 2]
        data = np.zeros(_BYTES, np.uint8)
        fastest = min(_call(rpc, name, data) for _ in range(_TURNS))
    except NoSuchFunction:
        return True, f"peer {name!r}, {how}; it is no broker, so nothing was measured"
    rate = _BYTES / fastest / 1e9
    return True, f"peer {name!r}, {how}; {seconds * 1e6:.0f} us a call, {rate:.2f} GB/s"


def _wait_for_peer(rpc: moolink.Rpc) -> PeerInfo | None:
    deadline = time.monotonic() + _TIMEOUT
    while time.monotonic() < deadline:
        for peer in rpc.peers():
            if peer["connected"]:
                return peer
        time.sleep(0.02)
    return None


def _wait_for_path(rpc: moolink.Rpc, name: str, path: str) -> Explanation:
    deadline = time.monotonic() + _BETTER
    explained = rpc.explain(name)
    while explained["path"] != path and time.monotonic() < deadline:
        time.sleep(0.02)
        explained = rpc.explain(name)
    return explained


def _call(rpc: moolink.Rpc, name: str, data: object) -> float:
    began = time.perf_counter()
    rpc.sync(name, MEASURE, data)
    return time.perf_counter() - began
