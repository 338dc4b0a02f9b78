"""Load on `fedecider serve`: a steady rate of requests for minutes, beside an older version of the service.

    python benchmarks/serve.py --run RUN [--before PYTHON] [--rate 200] [--minutes 10]

Requests come at --rate a second, at times drawn in advance (a Poisson process), whether earlier ones are answered or
not; a time runs from that moment to the last byte of the answer, so a service that falls behind is seen. Histories of 1
to 5 items, k 10, by item keys and with an API key; an answer without status 200 and 10 items is a failure. --before is
the python of another checkout, whose service gets a minute for every five. In one minute more, the newer one reads
the run again (SIGHUP). Services and clients share the cores; the page is benchmarks/results/serve.md.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import numpy as np
import provenance
import psutil

from fedecider.running.command import run

PAGE = Path(__file__).resolve().parent / "results" / "serve.md"
MIB = 2**20
WARM = 200
K = 10
KEY = "a-key-of-the-load-test"
HEADERS = {"Content-Type": "application/json", "X-API-Key": KEY}
NUM_CLIENTS = 64
NOW, BEFORE, RELOAD = "now", "before", "now, the run read again"


class Minute(NamedTuple):
    """What one minute gave."""

    milliseconds: list[float]
    errors: list[str]
    cpu_seconds: float
    """Of the service."""


@contextmanager
def service(python: str, run: str) -> Iterator[tuple[str, psutil.Process]]:
    """Host and port of a service of ``run``, and its process."""
    command = [python, "-m", "fedecider.cli.main", "serve", "--run", run, "--port", "0"]
    extra = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "FEDECIDER_API_KEY": KEY}
    with subprocess.Popen(command, env={**os.environ, **extra}, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = next((line for line in process.stdout if "http://" in line), "")
            url = re.search(r"http://\S+?/", line)
            if url is None:
                raise SystemExit("the service did not start")
            threading.Thread(target=process.stdout.read, daemon=True).start()
            yield urlsplit(url[0]).netloc, psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(60)


def get(address: str, path: str) -> bytes:
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.request("GET", path, headers=HEADERS)
    return connection.getresponse().read()


def questions(address: str, number: int, seed: int) -> list[bytes]:
    """Bodies of requests, the same ones for the same run and seed."""
    rng = random.Random(seed)
    names = [domain["name"] for domain in json.loads(get(address, "/domains"))["domains"]]
    catalogue = {
        name: [item["key"] for item in json.loads(get(address, f"/items?domain={name}&limit=50"))["items"]]
        for name in names
    }
    bodies = []
    for _ in range(number):
        name = rng.choice(names)
        history = rng.sample(catalogue[name], rng.randint(1, 5))
        bodies.append(json.dumps({"domain": name, "history": history, "k": K}).encode())
    return bodies


def ask(connection: http.client.HTTPConnection, body: bytes) -> str:
    """What is wrong with the answer, empty where nothing is."""
    try:
        connection.request("POST", "/recommend", body, HEADERS)
        response = connection.getresponse()
        content = json.loads(response.read())
        return "" if response.status == 200 and len(content["items"]) == K else str(content)[:200]
    except (OSError, http.client.HTTPException, ValueError) as error:
        connection.close()
        return repr(error)[:200]


def minute(address: str, process: psutil.Process, bodies: Sequence[bytes], rate: float, seed: int) -> Minute:
    """``bodies`` at ``rate`` a second; each client takes the next one as soon as it is free."""
    rng = random.Random(seed)
    due_s = list(accumulate(rng.expovariate(rate) for _ in bodies))
    places, milliseconds, errors = iter(range(len(bodies))), [], []
    cpu, begun = sum(process.cpu_times()[:2]), time.perf_counter()

    def client() -> None:
        connection = http.client.HTTPConnection(address, timeout=60)
        while (place := next(places, None)) is not None:
            time.sleep(max(0.0, begun + due_s[place] - time.perf_counter()))
            error = ask(connection, bodies[place])
            milliseconds.append(1000 * (time.perf_counter() - begun - due_s[place]))
            errors.extend([error] if error else [])

    threads = [threading.Thread(target=client) for _ in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Minute(milliseconds, errors, sum(process.cpu_times()[:2]) - cpu)


def row(name: str, minutes: Sequence[Minute], process: psutil.Process) -> str:
    times = [one for part in minutes for one in part.milliseconds]
    p50, p95, p99 = np.percentile(times, [50, 95, 99])
    worst = max(np.percentile(part.milliseconds, 99) for part in minutes)
    cpu_ms = 1000 * sum(part.cpu_seconds for part in minutes) / len(times)
    return (
        f"| {name} | {len(minutes)} | {len(times)} | {sum(len(part.errors) for part in minutes)} | {p50:.1f} "
        f"| {p95:.1f} | {p99:.1f} | {worst:.1f} | {max(times):.0f} | {cpu_ms:.2f} "
        f"| {process.memory_info().rss / MIB:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--run", required=True, help="a finished run of the cross-silo track")
    parser.add_argument("--before", default="", help="the python of a checkout to compare with")
    parser.add_argument("--rate", type=float, default=200.0, help="requests a second")
    parser.add_argument("--minutes", type=int, default=10)
    parser.add_argument("--output", type=Path, default=PAGE)
    args = parser.parse_args()
    pythons = {NOW: sys.executable, **({BEFORE: args.before} if args.before else {})}
    lines = provenance.heading("serve.py", 1)
    minutes: dict[str, list[Minute]] = {name: [] for name in pythons}
    with ExitStack() as stack:
        services = {name: stack.enter_context(service(python, args.run)) for name, python in pythons.items()}
        for address, process in services.values():
            minute(address, process, questions(address, WARM, seed=0), args.rate / 10, seed=0)

        def measure(name: str, place: int) -> Minute:
            address, process = services[name]
            bodies = questions(address, int(60 * args.rate), seed=1 + place)
            measured = minute(address, process, bodies, args.rate, seed=1 + place)
            for error in measured.errors[:3]:
                print(f"{name}: {error}", file=sys.stderr)
            print(row(name, [measured], process), flush=True)
            return measured

        for place in range(args.minutes):
            minutes[NOW].append(measure(NOW, place))
            if BEFORE in services and place % 5 == 0:
                minutes[BEFORE].append(measure(BEFORE, place))
        threading.Timer(20.0, services[NOW][1].send_signal, [signal.SIGHUP]).start()
        minutes[RELOAD] = [measure(NOW, args.minutes)]
        rows = [row(name, found, services[name if name in services else NOW][1]) for name, found in minutes.items()]
    text = [
        "# Load on the service",
        "",
        f"{args.rate:.0f} requests a second at random times, to one process on loopback with one thread for the model; "
        "clients and service share the cores. A time runs from the moment at which a request was due.",
        "",
        "| version | minutes | requests | failures | p50 ms | p95 ms | p99 ms | p99 of the worst minute | longest ms "
        "| CPU ms of the service a request | MiB |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        *rows,
        "",
        *lines,
    ]
    args.output.write_text("\n".join(text) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(run(main))
