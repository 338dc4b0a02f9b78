"""A typo in a size is one line and exit code 2 before anything is written, and not the end of the machine."""

import dataclasses
import runpy
import sys
from pathlib import Path

import pytest
import torch

from embedding_fr import setup
from fedecider.cross_silo.base_stages import pretrain_stage
from fedecider.cross_silo.command_line import parse_settings
from fedecider.cross_silo.feasibility import check_limits
from fedecider.data.catalogue import Catalogue
from fedecider.data.domain import Domain, Events
from fedecider.data.sample import sample_domains

REPOSITORY = Path(__file__).resolve().parents[1]
BILLION = 10**9
WORDS = ["--pretrain.ids", "keywords", "--pretrain.samples.dense_head", "false"]
WORDS += ["--pretrain.train.table_lr_multiplier", 1]
"""Item IDs that are searched with beams."""


@pytest.fixture
def federate(tmp_path, monkeypatch, capsys):
    """Run scripts/federate.py in an empty folder -> exit code, what it printed as errors, what it left there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    main = runpy.run_path(str(REPOSITORY / "scripts" / "federate.py"))["main"]

    def call(*words):
        try:
            code = main([str(word) for word in words])
        except SystemExit as stop:
            code = stop.code
        return code, capsys.readouterr().err, sorted(path.name for path in tmp_path.iterdir())

    return call


def rows() -> str:
    return "".join(f"u{u},i{(7 * u + 3 * n) % 20},5,{n}\n" for u in range(9) for n in range(4 + u % 3))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lora_rank", 100_000_000], "got lora_rank 100000000,"),
        (["--lora_rank", 4000], "got lora_rank 4000, expected at most 64, the width of the backbone"),
        (["--num_beams", BILLION], "got num_beams 1000000000,"),
        (["--num_beams", 9999, *WORDS], "got num_beams 9999, expected at most"),
        (["--num_threads", 10**12], "got num_threads 1000000000000,"),
        (["--num_rounds", 10**12], "got num_rounds 1000000000000,"),
        (["--pretrain.backbone.d_model", BILLION], "got pretrain.backbone.d_model 1000000000,"),
        (["--pretrain.backbone.num_layers", BILLION], "got pretrain.backbone.num_layers 1000000000,"),
    ],
)
def test_sizes_of_the_llm_track(federate, words, message):
    code, printed, left = federate(*words, "--output", "run")
    assert code == 2
    assert message in printed
    assert "Traceback" not in printed
    assert left == []


@pytest.mark.parametrize(
    ("method", "words", "message"),
    [
        ("fedmf", ["--embedding_size", BILLION], "got embedding_size 1000000000,"),
        ("fedmf", ["--num_threads", 10**12], "got num_threads 1000000000000,"),
        ("fedmf", ["--local_epochs", BILLION], "got local_epochs 1000000000,"),
        ("fedmf", ["--num_negatives", BILLION], "got num_negatives 1000000000,"),
        ("fedncf", ["--hidden_sizes", "1000000000,8"], "got the layer sizes '1000000000,8'"),
        ("pfedclr", ["--rank", BILLION], "got rank 1000000000,"),
    ],
)
def test_sizes_of_the_embedding_track(federate, tmp_path, method, words, message):
    (tmp_path / "ratings.dat").write_text(rows())
    data = ["--dataset", "toy", "--source", "amazon_ratings", "--raw", tmp_path, "--min_user_events", 3]
    code, printed, left = federate("--method", method, *data, *words, "--output", "run")
    assert code == 2
    assert message in printed
    assert "Traceback" not in printed
    assert left == ["ratings.dat"]


def test_tables_that_do_not_fit_into_the_machine_are_refused(federate, tmp_path, monkeypatch):
    (tmp_path / "ratings.dat").write_text(rows())
    data = ["--dataset", "toy", "--source", "amazon_ratings", "--raw", tmp_path, "--min_user_events", 3]
    data += ["--output", "run"]
    monkeypatch.setattr(setup, "device_bytes", lambda device: 30_000_000)
    code, printed, left = federate("--method", "fedmf", *data, "--embedding_size", 65536)
    assert (code, left) == (2, ["ratings.dat"])
    assert (
        "(embedding_size 65536, local_epochs 10, num_negatives 4, 9 users, 20 items), expected at most the 0.0 GB"
        in printed
    )
    assert federate("--method", "fedmf", *data, "--embedding_size", 8, "--num_rounds", 1)[0] == 0


def test_a_catalogue_of_few_items_takes_as_many_beams_and_none_where_ids_are_one_token():
    events = Events(["a", "b"], [[0, 1, 2, 3], [4, 5, 6, 7]], None)
    keys = [f"i{number:02d}" for number in range(12)]
    domains = {"few": Domain("few", Catalogue("few", keys, keys, keys), events, events._replace(users=["c", "d"]), {})}
    settings = parse_settings(["--ensemble.kind", "none", *map(str, WORDS)])
    check_limits(with_beams(settings, 12), domains)
    for num_beams, message in ((11, "expected at least 12: hit@20 is reported"), (13, "expected at most 12")):
        with pytest.raises(ValueError, match=f"got num_beams {num_beams}, {message}"):
            check_limits(with_beams(settings, num_beams), domains)
    one_token = parse_settings(["--config", "configs/demo_causal.yaml", "--ensemble.kind", "none"])
    for num_beams in (1, 20):
        check_limits(with_beams(one_token, num_beams), domains)


def test_data_without_public_users_are_told_before_stage_1(tmp_path):
    """What a backbone would be trained on, where there are no synthetic histories."""
    domains = {
        name: dataclasses.replace(domain, public=Events([], [], None))
        for name, domain in sample_domains(("crime", "comics")).items()
    }
    settings = parse_settings(["--cache", str(tmp_path), "--pretrain.samples.synthetic_share", "0"])
    with pytest.raises(ValueError, match="got no public user in crime, comics, expected some"):
        pretrain_stage(settings.run, domains, torch.device("cpu"), quiet=True)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_a_client_with_nothing_to_train_on_is_told():
    users = Events(["a", "b"], [[0, 1, 2], [3, 4, 5]], None)  # the last two of each are held out
    keys = [f"i{number:02d}" for number in range(30)]
    domain = Domain("brief", Catalogue("brief", keys, keys, keys), users, Events([], [], None), {})
    settings = parse_settings(["--ensemble.kind", "none"])
    with pytest.raises(ValueError, match="got no user of brief with two training events, expected one at least"):
        check_limits(settings, {"brief": domain})
    longer = users._replace(sequences=[[0, 1, 2], [3, 4, 5, 6]])
    check_limits(settings, {"brief": dataclasses.replace(domain, clients=longer)})


def with_beams(settings, num_beams):
    return settings._replace(ranking=dataclasses.replace(settings.ranking, num_beams=num_beams))
