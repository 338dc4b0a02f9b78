"""Load on `fedecider serve`: requests a second, times and memory with few and many clients.

    python benchmarks/serve.py --run runs/demo [--requests 10000] [--output FILE.md]

Starts the service as a process of its own on loopback, with one thread for the model, and asks it from threads of this
process, each with one connection that it keeps. Histories of 1 to 5 items of random domains, k 10, by keys; every
answer must have status 200 and 10 items, else it counts as an error. Times are those that clients see.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple
from urllib.parse import urlsplit

import numpy as np
import provenance
import psutil

from fedecider.running.command import run

MIB = 2**20
WARM = 50
K = 10


class Level(NamedTuple):
    """What one number of clients gave."""

    clients: int
    milliseconds: list[float]
    errors: int
    seconds: float
    cpu_seconds: float
    """Of the service."""
    calls: float
    """Of the model."""
    mebibytes: float
    """Resident, afterwards."""


@contextmanager
def service(run: str) -> Iterator[tuple[str, psutil.Process]]:
    """Host and port of a service of ``run``, and its process."""
    command = [sys.executable, "-m", "fedecider.cli.main", "serve", "--run", run, "--port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("FEDECIDER_API_KEY", None)
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = next((line for line in process.stdout if "http://" in line), "")
            found = re.search(r"http://\S+?/", line)
            if found is None:
                raise SystemExit("the service did not start")
            yield urlsplit(found[0]).netloc, psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(60)


def get(address: str, path: str) -> bytes:
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.request("GET", path)
    return connection.getresponse().read()


def questions(address: str, number: int, seed: int) -> list[bytes]:
    """Bodies of requests, the same ones for the same run and seed."""
    rng = random.Random(seed)
    names = [one["name"] for one in json.loads(get(address, "/domains"))["domains"]]
    catalogue = {
        name: [one["key"] for one in json.loads(get(address, f"/items?domain={name}&limit=50"))["items"]]
        for name in names
    }
    bodies = []
    for _ in range(number):
        name = rng.choice(names)
        history = rng.sample(catalogue[name], rng.randint(1, 5))
        bodies.append(json.dumps({"domain": name, "history": history, "k": K}).encode())
    return bodies


def ask(address: str, bodies: Sequence[bytes], times: list[float], errors: list[str]) -> None:
    """One client: every body in turn."""
    connection = http.client.HTTPConnection(address, timeout=60)
    for body in bodies:
        begun = time.perf_counter()
        try:
            connection.request("POST", "/recommend", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            content = json.loads(response.read())
            if response.status != 200 or len(content["items"]) != K:
                errors.append(str(content)[:200])
        except (OSError, http.client.HTTPException, ValueError) as error:
            errors.append(repr(error)[:200])
            connection.close()
        times.append(1000 * (time.perf_counter() - begun))


def model_calls(address: str) -> float:
    found = re.search(rb"^fedecider_model_call_seconds_count (\S+)$", get(address, "/metrics"), re.M)
    assert found is not None
    return float(found[1])


def load(address: str, process: psutil.Process, clients: int, bodies: Sequence[bytes]) -> Level:
    times: list[float] = []
    errors: list[str] = []
    calls, cpu, begun = model_calls(address), sum(process.cpu_times()[:2]), time.perf_counter()
    threads = [
        threading.Thread(target=ask, args=(address, bodies[place::clients], times, errors)) for place in range(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds, cpu = time.perf_counter() - begun, sum(process.cpu_times()[:2]) - cpu
    for error in errors[:3]:
        print(f"error: {error}", file=sys.stderr)
    calls = model_calls(address) - calls
    return Level(clients, times, len(errors), seconds, cpu, calls, process.memory_info().rss / MIB)


def row(level: Level) -> str:
    number = len(level.milliseconds)
    p50, p95 = np.percentile(level.milliseconds, [50, 95])
    return (
        f"| {level.clients} | {number} | {number / level.seconds:.0f} | {p50:.1f} | {p95:.1f} | {level.errors} "
        f"| {number / level.calls:.1f} | {1000 * level.cpu_seconds / number:.1f} | {level.mebibytes:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--run", required=True, help="a finished run of the cross-silo track")
    parser.add_argument("--clients", default="1,8,32")
    parser.add_argument("--requests", type=int, default=10_000, help="over all numbers of clients, in equal shares")
    parser.add_argument("--output", default="")
    args = parser.parse_args()
    lines = ["# Load on the service", "", *provenance.heading("serve.py", 1), ""]
    counts = [int(number) for number in args.clients.split(",")]
    with service(args.run) as (address, process):
        load(address, process, 1, questions(address, WARM, seed=0))
        before = process.memory_info().rss / MIB
        number = args.requests // len(counts) * len(counts)
        lines += [
            f"{number} requests to one process on loopback, one thread for the model; the clients run on the "
            f"same cores. Resident memory before, after {WARM} requests: {before:.0f} MiB.",
            "",
            "| clients | requests | requests a second | p50 ms | p95 ms | errors | requests a model call "
            "| CPU ms of the service a request | MiB afterwards |",
            "|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        ]
        for clients in counts:
            bodies = questions(address, args.requests // len(counts), seed=clients)
            lines.append(row(load(address, process, clients, bodies)))
            print(lines[-1], flush=True)
    if args.output:
        with open(args.output, "w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(run(main))
