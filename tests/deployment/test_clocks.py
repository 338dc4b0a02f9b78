"""Clocks of a machine may go back: nothing that takes time is measured by them."""

import itertools
import re
import time
from pathlib import Path

from test_deployed import deployed, same, site_of

from fedecider.federation.record import read_records

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("fedecider", "embedding_fr", "idgen", "distill")
OF_THE_DAY = {
    "fedecider/data/times.py",  # no purchase is later than tomorrow
    "fedecider/deployment/commands.py",  # when a site was last heard of, as FLARE notes it
    "fedecider/scratch.py",  # how old a file of another machine is
}


def test_the_time_of_day_measures_nothing():
    paths = [path for name in PACKAGES for path in (REPOSITORY / name).rglob("*.py")]
    looks = [path for path in paths if re.search(r"\btime\.time\(", path.read_text("utf-8"))]
    assert {str(path.relative_to(REPOSITORY)) for path in looks} == OF_THE_DAY


def test_clocks_that_go_back_change_nothing(tmp_path, monkeypatch):
    """Those of a server and its sites, a day with every look at them, also between a run and its resume."""

    def sites(name):
        return [site_of("fedecider", client, tmp_path / name) for client in range(3)]

    straight, _, _, _ = deployed("fedecider", sites("straight"), 4)
    clock = itertools.count(2e9, -86_400.0)
    monkeypatch.setattr(time, "time", lambda: next(clock))
    folder = tmp_path / "server"
    deployed("fedecider", sites("back"), 2, folder)
    state, _, _, _ = deployed("fedecider", sites("back"), 4, folder, resume=True)
    assert same(state.server, straight.server)
    records = read_records(folder.with_suffix(".jsonl"))
    assert [record["round"] for record in records] == [1, 2, 3, 4]
    seconds = [value for record in records for name, value in record.items() if name.endswith("_s")]
    assert len(seconds) >= 8
    assert min(seconds) >= 0.0
