"""``moolink doctor``: the features that this machine offers to moolink, those missing, and why."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import importlib
import importlib.machinery
import importlib.metadata
import json
import os
import platform
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

import moolink
from moolink.cli import dump, limits
from moolink.cli.finding import Finding, State
from moolink.internal import extras
from moolink.internal.installation import why_no_core, why_stale
from moolink.internal.processes import available_cores

_EXTRA = re.compile(r"([\w.-]+)(?:\[([\w,-]+)\])?")  # the name and extras of a requirement


def main(argv: Sequence[str]) -> int:
    """Prints the report; returns 1 if something that moolink needs has failed."""
    parser = argparse.ArgumentParser(
        prog="moolink doctor",
        description="Show this machine's features for moolink, and why others are missing.",
    )
    parser.add_argument(
        "address",
        nargs="?",
        metavar="HOST:PORT",
        help="also connect to the broker or peer there, and measure each path to it",
    )
    parser.add_argument(
        "--token-file", metavar="FILE", help="for HOST:PORT: the token's file (default: as of Rpc)"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list of findings")
    options = parser.parse_args(argv)
    findings = examine()
    if options.address is not None:
        findings += _reached(options.address, options.token_file)
    if options.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        width = max(len(finding.topic) for finding in findings)
        for finding in findings:
            print(f"{finding.state:6}  {finding.topic:{width}}  {finding.text}")
        print(_verdict(findings))
    return int(any(finding.state == "failed" for finding in findings))


def _verdict(findings: Sequence[Finding]) -> str:
    """The report in one line."""
    failed = [finding.topic for finding in findings if finding.state == "failed"]
    if failed:
        return f"moolink does not work here as it should: see {', '.join(failed)}"
    absent = [finding.topic for finding in findings if finding.state == "absent"]
    return f"moolink works here{'; optional and absent: ' + ', '.join(absent) if absent else ''}"


def examine() -> list[Finding]:
    """Makes every check; a check that raises OSError is reported as failed, with its reason."""
    core, about_core = _core()
    findings = [_moolink(), *_shadowing(), about_core, _machine()]
    checks: list[tuple[str, Callable[[], str]]] = [
        ("memfd", _memfd),
        ("eventfd", _eventfd),
        ("pidfd", _pidfd),
        ("unix socket", _unix_socket),
        ("loopback tcp", _loopback),
    ]
    for topic, check in checks:
        try:
            findings.append(Finding(topic, "ok", check()))
        except (OSError, AttributeError) as error:
            findings.append(Finding(topic, "failed", str(error)))
    findings += limits.examine()
    findings += [_addresses(core), _dumps(), _cuda(), _verbs(core), _openssl(core)]
    return [*findings, _numpy(), *map(_extra, extras.names())]


def _moolink() -> Finding:
    python = f"Python {platform.python_version()} at {sys.executable}"
    try:
        version = importlib.metadata.version("moolink")
    except importlib.metadata.PackageNotFoundError:
        return Finding("moolink", "failed", f"not installed for {python}: pip install -e .")
    return Finding("moolink", "ok", f"{version}, {python}")


def _shadowing() -> list[Finding]:
    """A package that comes before this one for programs that are started in this folder."""
    spec = importlib.machinery.PathFinder.find_spec("moolink", [os.getcwd(), *sys.path])
    if spec is None or spec.origin is None:
        return []
    first, this = (
        os.path.dirname(os.path.realpath(path)) for path in (spec.origin, str(moolink.__file__))
    )
    if first == this:
        return []
    core = importlib.machinery.PathFinder.find_spec("_core", [first])
    fault = "has no compiled core, so that they fail" if core is None else "is another build"
    return [
        Finding(
            "moolink here",
            "failed",
            f"{first} comes before {this} for programs started in this folder with -m or -c, and "
            f"{fault}: start them in another folder, or run `pip install -e .` in the checkout",
        )
    ]


def _core() -> tuple[ModuleType | None, Finding]:
    """The extension module; None if it does not load, or is stale: it may lack functions then."""
    if (missing := why_no_core()) is not None:
        return None, Finding("core", "failed", missing)
    try:
        module = importlib.import_module("moolink._core")
    except ImportError as error:
        cure = "install moolink again, for this Python and this system"
        return None, Finding("core", "failed", f"it does not load: {error}; {cure}")
    if (stale := why_stale()) is not None:
        return None, Finding("core", "failed", stale)
    return module, Finding("core", "ok", str(module.__file__))


def _not_looked_for(topic: str) -> Finding:
    return Finding(topic, "absent", "not looked for: moolink's core does not work, see above")


def _machine() -> Finding:
    cores, present = available_cores(), os.cpu_count()
    pages, page_size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    memory = f"{pages * page_size / 2**30:.1f} GiB memory"
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    return Finding("machine", "ok", f"{system}, {cores} of {present} cores usable, {memory}")


def _memfd() -> str:
    import fcntl

    descriptor = os.memfd_create("moolink-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, mmap_size := 1 << 20)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        os.pwrite(descriptor, b"\0", mmap_size - 1)
    finally:
        os.close(descriptor)
    return "shared memory segments can be made and sealed"


def _eventfd() -> str:
    os.close(os.eventfd(0, os.EFD_CLOEXEC))
    return "sleeping threads and environment workers can be woken"


def _pidfd() -> str:
    descriptor = os.pidfd_open(os.getpid())
    try:
        signal.pidfd_send_signal(descriptor, 0)
    finally:
        os.close(descriptor)
    return "deaths of processes are seen at once"


def _unix_socket() -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"\0moolink-doctor-{os.getpid()}")
    return "abstract names can be bound (transport shm)"


def _loopback() -> str:
    families = []
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as listener:
                listener.bind((address, 0))
        except OSError as error:
            if family == socket.AF_INET:
                raise
            families.append(f"no {address} ({error.strerror})")
        else:
            families.append(address)
    return ", ".join(families)


def _reached(address: str, token_file: str | None) -> list[Finding]:
    from moolink.cli.reach import measure, obstacle

    if (why := obstacle(address, token_file)) is not None:
        return [Finding(address, "failed", why)]
    found = {path: measure(address, path, token_file) for path in ("shm", "verbs", "tcp")}
    reached = any(connects for connects, _ in found.values())
    lack: State = "absent" if reached else "failed"
    return [
        Finding(f"{address} by {path}", "ok" if connects else lack, text)
        for path, (connects, text) in found.items()
    ]


def _addresses(core: ModuleType | None) -> Finding:
    if core is None:
        return _not_looked_for("addresses")
    chosen = os.environ.get("MOOLINK_INTERFACE", "")
    try:
        addresses: list[str] = core.host_addresses(chosen)
    except (RuntimeError, ValueError) as error:
        return Finding("addresses", "failed", str(error))
    by = f" (MOOLINK_INTERFACE={chosen})" if chosen else ""
    return Finding("addresses", "ok", f"peers are told {', '.join(addresses)}{by}")


def _dumps() -> Finding:
    try:
        pids = sorted(dump.processes())
    except OSError as error:
        return Finding("dump", "absent", f"processes that use moolink cannot be found: {error}")
    if not pids:
        return Finding("dump", "ok", "no process of this user uses moolink now")
    numbers = ", ".join(map(str, pids))
    return Finding("dump", "ok", f"moolink dump can show: {numbers}")


def _cuda() -> Finding:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return Finding("CUDA", "absent", str(error))
    count, version = ctypes.c_int(), ctypes.c_int()
    if status := driver.cuInit(0):
        return Finding("CUDA", "absent", f"libcuda.so.1 is here, but cuInit returned {status}")
    driver.cuDriverGetVersion(ctypes.byref(version))
    driver.cuDeviceGetCount(ctypes.byref(count))
    major, minor = version.value // 1000, version.value % 1000 // 10
    names = ", ".join(_cuda_name(driver, index) for index in range(count.value))
    text = f"{count.value} devices ({names}), driver for CUDA {major}.{minor}"
    if not count.value:
        return Finding("CUDA", "absent", f"{text}: no device is visible")
    return Finding("CUDA", "ok", f"{text}; tensors there travel through pinned host memory")


def _cuda_name(driver: ctypes.CDLL, index: int) -> str:
    device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    if driver.cuDeviceGet(ctypes.byref(device), index):
        return "?"
    driver.cuDeviceGetName(name, len(name), device)
    return name.value.decode(errors="replace")


def _verbs(core: ModuleType | None) -> Finding:
    if core is None:
        return _not_looked_for("RDMA")
    found = core.verbs_info()
    others = [device for device in found["devices"] if device != found["chosen"]]
    seen = f"; also there: {'; '.join(others)}" if others else ""
    if not found["usable"]:
        return Finding("RDMA", "absent", found["reason"])
    setting = os.environ.get("MOOLINK_VERBS", "")
    uses = {
        "": "available, not used by peers with a token: RDMA is not encrypted; MOOLINK_VERBS=1 "
        "enables it",
        "0": "available, turned off by MOOLINK_VERBS=0",
        "1": "used between hosts (MOOLINK_VERBS=1), not encrypted",
    }
    if setting not in uses:
        return Finding("RDMA", "failed", f"MOOLINK_VERBS is {setting!r}: only 0 and 1 are valid")
    return Finding("RDMA", "ok", f"{found['chosen']}, {found['library']}{seen}; {uses[setting]}")


def _openssl(core: ModuleType | None) -> Finding:
    if core is None:
        return _not_looked_for("OpenSSL")
    found = core.openssl_info()
    if found["usable"]:
        return Finding("OpenSSL", "ok", f"{found['version']} at {found['where']}: encrypts tcp")
    lack = "without it a peer with a token uses tcp within this host only: install libssl3"
    return Finding("OpenSSL", "absent", f"{found['reason']}; {lack}")


def _numpy() -> Finding:
    try:
        return Finding("numpy", "ok", importlib.metadata.version("numpy"))
    except importlib.metadata.PackageNotFoundError:
        return Finding("numpy", "failed", "not installed: pip install numpy")


def _extra(name: str) -> Finding:
    """The packages of an extra. Their versions come from metadata: to import torch or jax would
    take seconds."""
    present, missing = [], []
    for package in dict.fromkeys(_distributions(extras.packages(name))):
        try:
            present.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
    if not missing:
        return Finding(f"extra {name}", "ok", ", ".join(present))
    text = f"no {', '.join(missing)}: {extras.install_command(name)}"
    return Finding(f"extra {name}", "absent", text)


def _distributions(requirements: Sequence[str]) -> Iterator[str]:
    """The distributions that requirements name, with those of their extras."""
    for requirement in requirements:
        match = _EXTRA.match(requirement)
        if match is None:
            continue
        name, of = match.groups()
        yield name
        for extra in of.split(",") if of else ():
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                yield from _distributions(extras.packages(extra, name))
