"""What encryption costs on tcp: TLS beside plain connections and beside AES-GCM alone, interleaved.

    python benchmarks/tls.py

One way: an array of so many bytes is sent and answered with a few, GB/s, over loopback in TLS and
without (`insecure=True`); AES-128-GCM is what one thread of the same libcrypto encrypts. The bar is
0.85 of 1 / (1 / plain + 1 / AES-GCM), as if each byte were copied as without TLS and passed the
cipher once at each side, on a processor of its own; OpenSSL and moolink's BIO copy it once more
each. "both" is what the cipher does for each side while both encrypt at once: less than alone where
the two processors share a core. In turns: another thread of each peer encrypts and
decrypts (`MOOLINK_TLS_THREAD=1`; the other columns are without it). "possible" is the speed if this
thread and the rest of each peer had a processor each: 1 / the largest processor time of a byte.
Echo: the round trip of a call with an int. Connection: until the first answer to a new peer that
has the address.
Processor time, of both sides and of the cipher alone, tells what a byte costs where; unlike speeds
it is much the same on a busy machine, but for the time that a side looks for an answer before it
sleeps. Each figure is the median over the rounds, in each of which everything gets its turn;
quotients and differences are medians of those of each round.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import moolink
from moolink import _core

SIZES = {"1 MB": 1 << 20, "16 MB": 16 << 20, "64 MB": 64 << 20}
BATCH = 256 << 10  # bytes: fits the cache, and a call of ctypes is little beside it
BAR = 0.85
ECHO_BAR = 5e-6  # seconds above plain
CONNECTION_BAR = 3e-3


class AesGcm:
    """AES-128-GCM of the OpenSSL that moolink uses, on one thread."""

    def __init__(self) -> None:
        where = _core.openssl_info()["where"]
        self._crypto = ctypes.CDLL(where)  # looks in what it depends on, too
        for name in ("EVP_CIPHER_CTX_new", "EVP_aes_128_gcm"):
            getattr(self._crypto, name).restype = ctypes.c_void_p
        self._cipher = ctypes.c_void_p(self._crypto.EVP_aes_128_gcm())
        self._context = ctypes.c_void_p(self._crypto.EVP_CIPHER_CTX_new())
        self._key, self._nonce = ctypes.create_string_buffer(16), ctypes.create_string_buffer(12)
        self._crypto.EVP_EncryptInit_ex(self._context, self._cipher, None, self._key, self._nonce)
        self._plain = ctypes.create_string_buffer(BATCH)
        self._secret = ctypes.create_string_buffer(BATCH + 16)

    def speed(self, seconds: float) -> tuple[float, float]:
        """Bytes a second, and seconds of processor time a byte."""
        encrypt, size = self._crypto.EVP_EncryptUpdate, ctypes.c_int()
        done = 0
        start, spent = time.perf_counter(), time.process_time()
        while (elapsed := time.perf_counter() - start) < seconds:
            encrypt(self._context, self._secret, ctypes.byref(size), self._plain, BATCH)
            done += BATCH
        return done / elapsed, (time.process_time() - spent) / done


TLS_THREAD = "moolink tls"


def time_by_thread(pid: int) -> dict[str, float]:
    """Returns a process's seconds of processor time: of all threads, and of the TLS thread."""
    total = {"all": 0.0, TLS_THREAD: 0.0}
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
        ticks = [int(field) for field in rest.split()[11:13]]
        seconds = sum(ticks) / os.sysconf("SC_CLK_TCK")
        total["all"] += seconds
        if name == TLS_THREAD:
            total[TLS_THREAD] += seconds
    return total


class Peer:
    """A server in its own process, and a client here."""

    def __init__(self, insecure: bool, in_turns: bool = False) -> None:
        self._insecure = insecure
        os.environ["MOOLINK_TLS_THREAD"] = str(int(in_turns))
        self._server = subprocess.Popen(
            [sys.executable, __file__, "--serve", *(["--insecure"] if insecure else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._server.stdout is not None
        self._address = self._server.stdout.readline().strip()
        self.rpc = self._connected()
        cipher = self.rpc.explain("server")["cipher"]
        assert (cipher is None) == insecure, cipher

    def _connected(self) -> moolink.Rpc:
        rpc = moolink.Rpc(transports=["tcp"], insecure=self._insecure)
        rpc.connect(self._address)
        rpc.sync("server", "echo", 0)
        return rpc

    def connection(self, count: int) -> float:
        """Seconds until the first answer; those of the peer itself without them."""
        samples = []
        for _ in range(count):
            with moolink.Rpc(transports=["tcp"], insecure=self._insecure) as rpc:
                start = time.perf_counter()
                rpc.connect(self._address)
                rpc.sync("server", "echo", 0)
                samples.append(time.perf_counter() - start)
        return statistics.median(samples)

    def cipher_at_both(self, aes: AesGcm, seconds: float) -> float:
        """Bytes a second of the cipher for each side, while both sides encrypt."""
        there = self.rpc.async_("server", "cipher", seconds)
        here = aes.speed(seconds)[0]
        return (here + float(there.result())) / 2

    def echo(self, count: int) -> float:
        """Seconds of a round trip, the median."""
        samples = []
        for i in range(count + count // 10):
            start = time.perf_counter()
            self.rpc.sync("server", "echo", i)
            samples.append(time.perf_counter() - start)
        return statistics.median(samples[count // 10 :])

    def one_way(self, size: int, seconds: float) -> tuple[float, float, float]:
        """Bytes a second, and seconds of processor time a byte at the sender and the receiver."""
        array = np.ones(size, np.uint8)
        self.rpc.sync("server", "first", array)
        sent = 0
        spent = time.process_time(), self.rpc.sync("server", "spent")
        start = time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds:
            self.rpc.sync("server", "first", array)
            sent += size
        here, there = time.process_time() - spent[0], self.rpc.sync("server", "spent") - spent[1]
        return sent / elapsed, here / sent, there / sent

    def by_thread(self, size: int, seconds: float) -> dict[str, float]:
        """Returns bytes a second, and seconds of processor time a byte by side and thread."""
        pids = {"sender": os.getpid(), "receiver": self._server.pid}
        before = {side: time_by_thread(pid) for side, pid in pids.items()}
        figures = {"speed": self.one_way(size, seconds)[0]}
        sent = figures["speed"] * seconds + size  # with the first array, which is not timed
        for side, pid in pids.items():
            after = time_by_thread(pid)
            tls = after[TLS_THREAD] - before[side][TLS_THREAD]
            figures[f"{side}, TLS"] = tls / sent
            figures[f"{side}, rest"] = (after["all"] - before[side]["all"] - tls) / sent
        return figures

    def close(self) -> None:
        self.rpc.close()
        self._server.kill()
        self._server.communicate()


def serve(insecure: bool) -> None:
    aes = AesGcm()
    with moolink.Rpc("server", transports=["tcp"], insecure=insecure) as rpc:
        rpc.define("echo", lambda x: x)
        rpc.define("first", lambda x: float(x[0]))
        rpc.define("spent", time.process_time)
        rpc.define("cipher", lambda seconds: aes.speed(seconds)[0])
        print(rpc.listen("127.0.0.1:0")[0], flush=True)
        sys.stdin.read()


def one_round(
    plain: Peer, tls: Peer, turns: Peer, aes: AesGcm, options: argparse.Namespace
) -> dict[str, dict[str, float]]:
    figures: dict[str, dict[str, float]] = {}
    for name, size in SIZES.items():
        alone, cipher = aes.speed(options.seconds / 2)
        both = plain.cipher_at_both(aes, options.seconds / 2)
        figures[name] = {"AES-GCM": alone, "both": both, "cipher": cipher}
        for who, peer in (("plain", plain), ("TLS", tls)):
            speed, sender, receiver = peer.one_way(size, options.seconds)
            figures[name] |= {who: speed, f"{who} sender": sender, f"{who} receiver": receiver}
        bound = 1 / (1 / figures[name]["plain"] + 1 / alone)
        figures[name]["of bound"] = figures[name]["TLS"] / bound
        # A tick of processor time is 10 ms.
        figures[f"{name} in turns"] = turns.by_thread(size, 2 * options.seconds)
    for what, measure in (("echo", Peer.echo), ("connection", Peer.connection)):
        count = options.calls if what == "echo" else options.connections
        pair = {"plain": measure(plain, count), "TLS": measure(tls, count)}
        figures[what] = {**pair, "more": pair["TLS"] - pair["plain"]}
    return figures


def print_table(rounds: list[dict[str, dict[str, float]]]) -> bool:
    def median(what: str, of: str) -> float:
        return statistics.median(figures[what][of] for figures in rounds)

    good = True
    print(
        f"{'one way, GB/s':16}{'plain':>10}{'TLS':>10}{'AES-GCM':>10}{'both':>8}{'TLS / bound':>14}"
    )
    for name in SIZES:
        speeds = [median(name, who) / 1e9 for who in ("plain", "TLS", "AES-GCM")]
        both, quotient = median(name, "both") / 1e9, median(name, "of bound")
        good &= quotient >= BAR
        print(f"{name:16}" + "".join(f"{s:10.2f}" for s in speeds) + f"{both:8.2f}{quotient:14.2f}")
    sides = ("plain sender", "TLS sender", "plain receiver", "TLS receiver", "cipher")
    print("processor, s/GB " + "".join(f"{side:>16}" for side in sides))
    for name in SIZES:
        print(f"{name:16}" + "".join(f"{median(name, side) * 1e9:16.3f}" for side in sides))
    columns = ("sender, rest", "sender, TLS", "receiver, rest", "receiver, TLS")
    print(
        "in turns, s/GB  " + "".join(f"{column:>16}" for column in columns) + "    GB/s  possible"
    )
    for name in SIZES:
        costs = [median(f"{name} in turns", column) * 1e9 for column in columns]
        speed = median(f"{name} in turns", "speed") / 1e9
        print(f"{name:16}" + "".join(f"{cost:16.3f}" for cost in costs), end="")
        print(f"{speed:8.2f}{1 / max(costs):10.2f}")
    print(f"{'time':16}{'plain':>10}{'TLS':>10}{'more':>10}")
    for what, unit, scale in (("echo", "us", 1e6), ("connection", "ms", 1e3)):
        times = [median(what, who) * scale for who in ("plain", "TLS", "more")]
        print(f"{what + ', ' + unit:16}" + "".join(f"{t:10.2f}" for t in times))
    good &= median("echo", "more") <= ECHO_BAR and median("connection", "TLS") <= CONNECTION_BAR
    print(
        f"{_core.openssl_info()['version']}; load average {os.getloadavg()[0]:.1f}, "
        f"{os.cpu_count()} cores; bars {'met' if good else 'MISSED'}"
    )
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=2000, help="of one latency measurement")
    parser.add_argument("--connections", type=int, default=20, help="made in a round")
    parser.add_argument("--seconds", type=float, default=0.4, help="of one bandwidth measurement")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--insecure", action="store_true", help=argparse.SUPPRESS)
    options: Any = parser.parse_args()
    if options.serve:
        serve(options.insecure)
        return
    aes, peers = AesGcm(), (Peer(True), Peer(False), Peer(False, in_turns=True))
    try:
        rounds = [one_round(*peers, aes, options) for _ in range(options.rounds)]
    finally:
        for peer in peers:
            peer.close()
    sys.exit(0 if print_table(rounds) else 1)


if __name__ == "__main__":
    main()
