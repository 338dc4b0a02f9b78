"""Every row of benchmarks/privacy.py is a run that the settings allow, with the guarantee that its name says."""

from argparse import Namespace
from importlib import import_module

import pytest

SET = ["--num_rounds", "2", "--local_epochs", "1", "--lora_rank", "8"]


@pytest.fixture(scope="module")
def table():
    pytest.importorskip("dp_accounting", reason="needs dp-accounting: pip install '.[dp]'")
    return import_module("privacy")  # benchmarks/ is on the path of the tests


def test_every_row_can_be_run(table, tmp_path):
    args = Namespace(config=str(table.CONFIG), data=str(tmp_path), cache=str(tmp_path), method="fedavg", set=SET)
    seen = {row: table.settings_of(row, 0, args) for row in table.ROWS}
    for row, settings in seen.items():
        users, uploads = settings.training.user_privacy, settings.run.privacy
        assert (users.clip is not None) == row.startswith("users"), row
        assert (uploads.clip is not None) == row.startswith("uploads"), row
        noise = float(row.rpartition("noise ")[2]) if "noise" in row else 0.0
        assert max(users.noise_scale, uploads.noise_scale) == noise, row
    assert len([row for row in seen if row.startswith("users, noise")]) == 4
