"""The broker as a program: ``moolink-broker [address]`` or ``python -m moolink.broker``.

``moolink-broker token`` makes tokens: moolink/cli/token.py.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from moolink.internal.signals import not_ignored

if TYPE_CHECKING:
    from moolink.dashboard.server import Dashboard
    from moolink.group.broker_peer import Broker
    from moolink.tokens import Identity

DEFAULT_ADDRESS = "127.0.0.1:4431"
_LEVELS = ("error", "warning", "info", "debug", "none")


def _parser(default_address: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moolink-broker",
        description="Where the peers of groups meet. It keeps nothing that its members cannot tell "
        "it again: groups go on while it is away, and it may be restarted at any time.",
        epilog="moolink-broker token new|group|show makes and names tokens; see its --help.",
    )
    parser.add_argument(
        "address",
        nargs="?",
        default=default_address,
        help="host:port to listen on; port 0 takes a free one; 0.0.0.0:4431 is for peers on other "
        "machines too (default: %(default)s)",
    )
    parser.add_argument(
        "--first",
        action="store_true",
        help="no members of an earlier broker can be around: form the first group at once instead "
        "of after a second of listening",
    )
    parser.add_argument(
        "--advertise",
        metavar="HOST[:PORT]",
        help="the address that peers are told instead of those listened on",
    )
    keys = parser.add_mutually_exclusive_group()
    keys.add_argument(
        "--token-file",
        metavar="FILE",
        help="the job's token, or a group's key (default: $MOOLINK_TOKEN_FILE, or the user's own "
        "token, made at first use)",
    )
    keys.add_argument(
        "--insecure",
        action="store_true",
        help="ask for no token: any process that reaches the port may join every group",
    )
    parser.add_argument(
        "--http",
        metavar="HOST:PORT",
        help="serve the dashboard: groups, members, rounds and paths in a browser, /metrics for "
        "Prometheus; needs moolink's extra 'dashboard'",
    )
    parser.add_argument("--log-level", choices=_LEVELS, default="info")
    parser.add_argument(
        "--announce-fd",
        type=int,
        metavar="FD",
        help='write "host:port" and a newline to this descriptor once the broker listens',
    )
    return parser


def main(arguments: Sequence[str] | None = None, *, default_address: str = DEFAULT_ADDRESS) -> int:
    """Runs a broker until SIGINT or SIGTERM; returns the exit status, 1 if it cannot listen.

    A signal that was ignored at the start stays ignored.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["token"]:
        from moolink.cli.token import main as token

        return token(arguments[1:])
    options = _parser(default_address).parse_args(arguments)
    # Blocked in every thread that is started from here on, so that sigwait below takes them.
    signals = not_ignored((signal.SIGINT, signal.SIGTERM))
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)

    import moolink
    from moolink import tokens

    moolink.set_log_level(options.log_level)
    try:
        # Once: the file may be a pipe.
        proof = tokens.identity(token_file=options.token_file, insecure=options.insecure)
        made = moolink.Broker(first=options.first, token=proof)
    except (moolink.AuthError, ValueError) as error:
        print(f"moolink-broker: {error}", file=sys.stderr)
        return 1
    with made as broker:
        try:
            addresses = broker.listen(options.address, options.advertise)
        except (moolink.Error, ValueError, OSError) as error:
            print(f"moolink-broker: cannot listen on {options.address}: {error}", file=sys.stderr)
            return 1
        reachable = [address for address in addresses if address.startswith("tcp://")]
        print(f"moolink-broker listens on {' '.join(reachable)}", flush=True)
        _tell_of_loopback(options.address)
        try:
            dashboard = _dashboard(broker, options.http, proof)
        except (ImportError, ValueError, OSError) as error:
            print(f"moolink-broker: no dashboard on {options.http}: {error}", file=sys.stderr)
            return 1
        if options.announce_fd is not None:
            with os.fdopen(options.announce_fd, "w") as announce:
                announce.write(reachable[0].removeprefix("tcp://") + "\n")
        signal.sigwait(signals)
        if dashboard is not None:
            dashboard.close()
    return 0


def _dashboard(broker: Broker, address: str | None, proof: Identity) -> Dashboard | None:
    if address is None:
        return None
    try:
        from moolink.dashboard.server import Dashboard
    except ModuleNotFoundError as missing:
        from moolink.internal.extras import install_command

        raise ImportError(
            f"{missing.name}, which --http needs, is not installed: {install_command('dashboard')}"
        ) from None
    served = Dashboard(broker, address, proof.keys[0].dashboard() if proof.keys else None)
    print(f"dashboard on http://{served.address}", flush=True)
    if served.needs_key:
        print(
            f"its key, for {proof.origin}: moolink-broker token dashboard --token-file FILE",
            flush=True,
        )
    return served


def _tell_of_loopback(address: str) -> None:
    """Its own machine refuses a remote peer, so no other message would tell the user."""
    from moolink.internal import logs
    from moolink.internal.addresses import is_loopback

    host, _, port = address.rpartition(":")
    if not is_loopback(host):
        return
    port = DEFAULT_ADDRESS.rpartition(":")[2] if port == "0" else port
    logs.logger.info(
        "only this machine reaches %s; for peers on other machines run: moolink-broker 0.0.0.0:%s",
        host,
        port,
    )


if __name__ == "__main__":
    sys.exit(main())
