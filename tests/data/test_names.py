"""What companies may not be called: tables have rows and means of these names."""

import pandas as pd
import pytest

from fedecider import from_events
from fedecider.cli.main import main
from fedecider.cross_silo.comparison import BASELINES
from fedecider.cross_silo.ensembles import reserved_labels
from fedecider.data.names import NAME, TAKEN
from fedecider.data.sites import publish
from fedecider.id_based import BUILT_IN as WITH_IDS
from fedecider.methods import BUILT_IN as WITH_TEXTS

ROWS = [{"user": u, "item": f"i{(u + s) % 5}", "time": 10 * u + s} for u in range(6) for s in range(3)]
ITEMS = [{"item": f"i{number}", "title": f"Thing {number}"} for number in range(5)]


def test_no_row_of_a_table_is_missing():
    rows = {*reserved_labels("fedavg"), *BASELINES, *WITH_IDS, *WITH_TEXTS}
    assert {row.casefold() for row in rows if NAME.fullmatch(row)} <= TAKEN
    assert {"macro", "mean", "teacher", "student", "canary"} <= TAKEN


def test_a_name_that_no_folder_can_have_is_refused():
    from_events({"north": ROWS, "a" * 100: ROWS}, ITEMS)
    with pytest.raises(ValueError, match=r"expected up to 100 letters"):
        from_events({"north": ROWS, "a" * 101: ROWS}, ITEMS)


@pytest.mark.parametrize("name", ["macro", "Mean", "LOCAL", "popularity", "FedAvg"])
def test_they_are_refused_however_they_are_written(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = f"'{name}', expected another name, such as {name}-shop"
    for asked in (
        lambda: from_events({"north": ROWS, name: ROWS}, ITEMS),
        lambda: from_events([{**row, "shop": ("north", name)[row["user"] % 2]} for row in ROWS], ITEMS, company="shop"),
        lambda: publish(None, ITEMS, tmp_path / "public", companies=["north", name], texts={"title": "title"}),
    ):
        with pytest.raises(ValueError, match=said):
            asked()
    with pytest.raises(ValueError, match=f"'{name}', expected another name"):
        from_events(ROWS, ITEMS, name=name)
    pd.DataFrame(ROWS).to_csv(f"{name}.csv", index=False)
    pd.DataFrame(ITEMS).to_csv("things.csv", index=False)
    for words in (
        ["import", f"{name}.csv", "--items", "things.csv", "--output", "out"],
        ["federate", "--events", f"{name}.csv", "--items", "things.csv", "--output", "out"],
    ):
        capsys.readouterr()
        assert main(words) == 2
        assert capsys.readouterr().err.count(f"'{name}', expected another name") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([f"{name}.csv", "things.csv"])


def test_a_longer_name_with_one_of_them_in_it_is_fine():
    assert from_events({"macro-shop": ROWS, "locals": ROWS}, ITEMS).names == ["locals", "macro-shop"]
