"""What an import of millions of rows costs, beside pandas and polars that only read the same file: CPU seconds, memory.

Run: python benchmarks/import_speed.py --output benchmarks/results/import_speed.md
The table is drawn: six columns, 300,000 customers, 60,000 items, 1.5 million orders. Every reader has a process of its
own; pandas, polars and DuckDB read all columns as text, the import does all that `fedecider import` does to events.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import provenance
import pyarrow as pa
import pyarrow.csv

from fedecider.running.command import run

READERS = {
    "polars reads": "import polars; n = polars.read_csv(path, infer_schema=False).height",
    "pandas reads": "import pandas; n = len(pandas.read_csv(path, dtype=str))",
    "DuckDB reads": "from fedecider.data.tables import open_table; t = open_table(path, 'events'); "
    "n = t.load({name: name for name in t.column_names})",
    "the import": "from fedecider.data.frames import events_of; n = len(events_of(path).events.user_E)",
}
CODE = "import sys, resource; path = sys.argv[1]; {}; u = resource.getrusage(resource.RUSAGE_SELF); "
CODE += "print(n, u.ru_utime + u.ru_stime, u.ru_maxrss / 1e6)"


def drawn(path: Path, num_rows: int) -> None:
    """Purchases of Zipf-distributed customers and items over three years, oldest first."""
    draw = np.random.default_rng(0)
    order = np.cumsum(draw.random(num_rows) < 0.3)
    customer_of = draw.zipf(1.2, order[-1] + 1) % 300_000
    times = np.sort(draw.integers(1_600_000_000, 1_700_000_000, order[-1] + 1))
    columns = {
        "customer_id": pa.array(customer_of[order]),
        "product_id": pa.array([f"P{item:06d}" for item in draw.zipf(1.3, num_rows) % 60_000]),
        "order_id": pa.array(order),
        "quantity": pa.array(draw.integers(1, 4, num_rows)),
        "price": pa.array(np.round(draw.random(num_rows) * 50, 2)),
        "order_date": pa.array(times[order], pa.timestamp("s")).cast(pa.string()),
    }
    pyarrow.csv.write_csv(pa.table(columns), path)


def measured(code: str, path: Path) -> tuple[int, float, float]:
    """Rows, CPU seconds and GB at the peak of a process."""
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(code), str(path)], capture_output=True, text=True, check=True
    )
    rows, seconds, peak = done.stdout.split()
    return int(rows), float(seconds), float(peak)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    lines = ["# What an import costs", "", *provenance.heading("import_speed.py", 2), ""]
    lines += ["| | rows | CPU s | times polars | peak GB |", "|---|---:|---:|---:|---:|"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "orders.csv"
        drawn(path, asked.rows)
        base = 0.0
        for name, code in READERS.items():
            rows, seconds, peak = measured(code, path)
            base = base or seconds
            lines.append(f"| {name} | {rows:,} | {seconds:.1f} | {seconds / base:.1f} | {peak:.2f} |")
    if asked.output:
        asked.output.unlink(missing_ok=True)
    provenance.write_lines(lines, asked.output)


if __name__ == "__main__":
    sys.exit(run(main))
