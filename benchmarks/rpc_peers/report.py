"""The figures of all rounds as tables, CSV and a picture."""

from __future__ import annotations

import csv
import statistics
from pathlib import Path

from rpc_peers.measure import IN_FLIGHT, MODES, SIZES

Figures = dict[str, list[dict[str, float]]]  # by name, one dict a round

CALLS = {
    "p50 us": "p50 µs",
    "p99 us": "p99 µs",
    "cpu us/call": "CPU µs/call",
    "1 in flight, calls/s": "calls/s, 1",
    "64 in flight, calls/s": "64 in flight",
    "64 in flight, cpu us/call": "CPU µs/call",
    "1000 in flight, calls/s": "1000 in flight",
    "1000 in flight, cpu us/call": "CPU µs/call",
}

# What moolink is to reach: figure, of whom, against whom (the best that ran), factor.
BARS = [
    ("p50 us", "moolink-shm", ("pyzmq-ipc",), 1 / 4),
    ("p50 us", "moolink-shm", ("grpc-unix", "grpc-tcp"), 1 / 15),
    ("p50 us", "moolink-tcp", ("pyzmq-tcp",), 1 / 2),
    ("p99 us", "moolink-shm", ("pyzmq-ipc",), 1),
    ("p99 us", "moolink-tcp", ("pyzmq-tcp",), 1),
    ("cpu us/call", "moolink-shm", ("pyzmq-ipc",), 1),
    ("cpu us/call", "moolink-tcp", ("pyzmq-tcp",), 1),
    ("64 in flight, calls/s", "moolink-shm", ("pyzmq-ipc",), 2),
    ("1000 in flight, calls/s", "moolink-shm", ("pyzmq-ipc",), 2),
    ("1 MB one way, GB/s", "moolink-shm", ("pyzmq-ipc", "torch.rpc", "ray"), 2),
    ("16 MB one way, GB/s", "moolink-shm", ("pyzmq-ipc", "torch.rpc", "ray"), 2),
    ("64 MB one way, GB/s", "moolink-shm", ("pyzmq-ipc",), 4),
    *(
        (f"{size} one way, GB/s", "moolink-shm", (limit,), 0.7)
        for limit in ("two copies (ring)", "one copy (vm_readv)")
        for size in SIZES
    ),
    *((f"{size} one way, GB/s", "moolink-tcp", ("TCP loopback",), 0.9) for size in SIZES),
]


def is_rate(what: str) -> bool:
    return what.endswith("/s")


def median(rounds: list[dict[str, float]], what: str) -> float | None:
    values = [figures[what] for figures in rounds if what in figures]
    return statistics.median(values) if values else None


def best(rounds: list[dict[str, float]], what: str) -> float:
    values = [figures[what] for figures in rounds]
    return max(values) if is_rate(what) else min(values)


def number(value: float) -> str:
    if value >= 9999.5:
        return f"{value / 1000:.3g}k"
    return f"{value:.0f}" if value >= 999.5 else f"{value:.3g}"


def cell(rounds: list[dict[str, float]], what: str) -> str:
    middle = median(rounds, what)
    return "-" if middle is None else f"{number(middle)} ({number(best(rounds, what))})"


def print_table(title: str, figures: Figures, columns: dict[str, str]) -> None:
    rows = {
        name: [cell(rounds, what) for what in columns]
        for name, rounds in figures.items()
        if any(median(rounds, what) is not None for what in columns)
    }
    if not rows:
        return
    first = max(len(name) for name in [*rows, title])
    print(f"\n{title:{first}}" + "".join(f"{head:>17}" for head in columns.values()))
    for name, cells in rows.items():
        print(f"{name:{first}}" + "".join(f"{text:>17}" for text in cells))


def print_tables(figures: Figures) -> None:
    print_table("echo of an int", figures, CALLS)
    for mode in MODES:
        columns = {f"{size} {mode}, GB/s": size for size in SIZES}
        print_table(f"float32, {mode}, GB/s", figures, columns)
    print("Cells: median over the rounds (best round).")


def print_bars(figures: Figures) -> None:
    """How moolink stands against what it is to reach, where both ran."""
    lines = []
    for what, name, rivals, factor in BARS:
        own = median(figures.get(name, []), what)
        there = {
            rival: value
            for rival in rivals
            if (value := median(figures.get(rival, []), what)) is not None
        }
        if own is None or not there:
            continue
        rival = (max if is_rate(what) else min)(there, key=lambda other: there[other])
        ratio = own / there[rival]
        reached = ratio >= factor if is_rate(what) else ratio <= factor
        sign = "at least" if is_rate(what) else "at most"
        lines.append(
            f"{what:26}{name + ' / ' + rival:38}{ratio:7.3g}   {sign} {factor:.3g}"
            f"{'' if reached else '   not reached'}"
        )
    if lines:
        print("\nratios of medians")
        print("\n".join(lines))


def write_csv(figures: Figures, path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["name", "figure", "median", "best", "rounds"])
        for name, rounds in figures.items():
            for what in rounds[0]:
                row = (median(rounds, what), best(rounds, what))
                writer.writerow([name, what, *(f"{value:.6g}" for value in row), len(rounds)])


def draw(figures: Figures, path: Path) -> None:
    """Latency, calls in flight and bandwidth as bars on logarithmic axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [
        ("round trip of an int, µs (bar: p50, line: up to p99)", {"p50 us": "p50"}),
        (
            "calls a second, by calls in flight",
            {f"{count} in flight, calls/s": str(count) for count in (1, *IN_FLIGHT)},
        ),
        ("float32 one way, GB/s", {f"{size} one way, GB/s": size for size in SIZES}),
        ("float32 pipelined, GB/s", {f"{size} pipelined, GB/s": size for size in SIZES}),
    ]
    figure, axes = pyplot.subplots(2, 2, figsize=(15, 11), layout="constrained")
    for axis, (title, series) in zip(axes.flat, panels, strict=True):
        names = [
            name
            for name, rounds in figures.items()
            if any(median(rounds, what) is not None for what in series)
        ]
        height = 0.8 / len(series)
        for i, (what, label) in enumerate(series.items()):
            places = [at + (i - (len(series) - 1) / 2) * height for at in range(len(names))]
            values = [median(figures[name], what) or 0 for name in names]
            bars = axis.barh(places, values, height, label=label)
            is_latency = what == "p50 us"  # whose label would lie on the line
            axis.bar_label(
                bars,
                [number(value) if value else "" for value in values],
                label_type="center" if is_latency else "edge",
                padding=0 if is_latency else 3,
                fontsize=7,
            )
            if is_latency:
                ends = [median(figures[name], "p99 us") or 0 for name in names]
                axis.hlines(places, values, ends, color="black", linewidth=1)
        axis.set_yticks(range(len(names)), names)
        axis.invert_yaxis()
        axis.set_xscale("log")
        axis.set_title(title, fontsize=10)
        axis.margins(x=0.12)
        if len(series) > 1:
            axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
