"""The public bar on the embedded sample, at sizes that say nothing (benchmarks/public_bar.py)."""

import json
import sys

import public_bar
import pytest
import torch

from fedecider.cross_silo.base_stages import begin
from fedecider.cross_silo.command_line import make_settings
from fedecider.data.sample import sample_domains
from fedecider.data.store import save_domain
from fedecider.evaluation.protocols import NUM_HELD_OUT, get_protocol
from fedecider.running.settings_files import load_config
from idgen.ranking import RankingContext, rank_task

TINY = {
    "num_rounds": 1,
    "local_epochs": 1,
    "pretrain.text_encoder": "tfidf",
    "num_eval_users": 20,
    "update_scales": "1",
}
TINY |= {"pretrain.backbone.num_layers": 2, "pretrain.train.max_steps": 3, "distill.epochs": 0}
BUDGET = public_bar.Budget(
    20,
    10,
    {**TINY, "pretrain.backbone.d_model": 16, "lora_rank": 16},
    {},
    {**TINY, "pretrain.backbone.d_model": 16, "lora_rank": 2},
)
ROWS = "text neighbours + counts;decoder;T5 with written IDs, half depth;four companies, decoder: FedAvg"


@pytest.fixture
def domain():
    return sample_domains(["crime"])["crime"]


@pytest.mark.parametrize("base", [public_bar.DECODER, public_bar.T5, public_bar.COMPANIES])
def test_nobodys_last_two_events_are_trained_on(domain, base):
    clients = public_bar.companies(domain, base, BUDGET, 0)
    users = public_bar.everyone(domain)
    sequence_of = dict(zip(users.users, map(list, users.sequences), strict=True))
    pool = next(iter(clients.values())).public
    assert len(pool.users) > 0
    for user, events in zip(pool.users, pool.sequences, strict=True):
        assert list(events) == sequence_of[user][:-NUM_HELD_OUT], user
    own = [user for client in clients.values() for user in client.clients.users]
    for client in clients.values():
        for user, events in zip(client.clients.users, client.clients.sequences, strict=True):
            assert list(events) == sequence_of[user]
    assert len(set(own)) == len(own) == (20 if base.has_large_pool else 40)
    assert not set(own) & set(pool.users)
    ranked = [place for places in public_bar.ranked_by(domain, clients).values() for place in places]
    assert sorted(ranked) == sorted(users.users.index(user) for user in [*own, *pool.users])


@pytest.mark.parametrize("ids", ["item", "keywords"])
def test_one_pass_gives_the_places_of_every_protocol(domain, ids, tmp_path):
    """Those of `rank_task`, which is asked for one protocol at a time."""
    base = public_bar.DECODER if ids == "item" else public_bar.T5
    options = {**base.options, **TINY, "pretrain.ids": ids, "pretrain.backbone.d_model": 16}
    given = {"data": "", "domains": "crime", "lora_rank": 2, "num_beams": 200, "cache": str(tmp_path)}
    settings = make_settings({**options, **given}, load_config(base.config))
    started = begin(settings.run, {"crime": domain}, torch.device("cpu"))
    task = public_bar.task_of(domain, domain.clients, started.ids["crime"].items, started.tokenizer, settings)
    found = public_bar.rank(started.model, task, settings, torch.device("cpu"))
    for name, full in public_bar.PROTOCOLS.items():
        context = RankingContext(settings.ranking, get_protocol(full).drop_seen, settings.training.precision)
        wanted = rank_task(started.model, task, "test", None, context)
        assert torch.equal(found[name], wanted), name
    assert not torch.equal(found["strict"], found["keep_seen"])


@pytest.mark.whole
def test_cells_go_on_where_they_stopped_and_the_page_says_what_was_not_run(domain, tmp_path, monkeypatch, capsys):
    save_domain(domain, tmp_path / "data" / "crime")
    monkeypatch.setitem(public_bar.BUDGETS, "cpu", BUDGET)
    monkeypatch.setitem(public_bar.PUBLISHED, "SOMEBODY, 2020", {"crime": (0.25, None)})
    output = tmp_path / "page.md"
    words = ["--datasets", "crime", "--seeds", "1", "--data", f"{tmp_path}/data", "--work", f"{tmp_path}/work"]
    words += ["--budget", "cpu", "--output", str(output), "--rows", ROWS]
    monkeypatch.setattr(sys, "argv", ["public_bar.py", *words, "--cells", "1"])
    public_bar.main()
    assert output.read_text().count("| not run |") == len(public_bar.ROWS) - 1
    monkeypatch.setattr(sys, "argv", ["public_bar.py", *words])
    public_bar.main()
    assert "text neighbours" not in capsys.readouterr().out.split("\n", 1)[1]
    rows = {line.split(" | ")[0][2:]: line.strip("| ").split(" | ") for line in output.read_text().splitlines()}
    counts, decoder = rows["text neighbours + counts"], rows["decoder"]
    assert counts[2] == decoder[2] == str(len(public_bar.everyone(domain).users))
    assert float(counts[3]) > float(counts[6]) * 0.9  # the sample has few repeats, and dropped ones only help
    assert float(rows["decoder, half depth + ensemble"][6]) > 0  # it ranks seen items by what it learned of them
    num_pool = sum(len(sequence) >= 5 for sequence in domain.public.sequences)
    assert rows["four companies, decoder: FedAvg"][1:3] == [str(num_pool), str(40 + num_pool)]
    assert rows["*SOMEBODY, 2020*"][3:5] == [".2500", "-"]
    assert rows["decoder of IDs alone"][1] != "not run"
    assert rows["four companies, T5: alone"][1].strip() == "not run"
    assert str(tmp_path) not in output.read_text().split("- Command")[0]
    cells = [json.loads(path.read_text()) for path in (tmp_path / "work" / "cpu").glob("*.json")]
    assert not any("ended" in cell for cell in cells)
    text = output.read_text()
    monkeypatch.setattr(public_bar, "measured", lambda cell: pytest.fail("run again"))
    public_bar.main()
    assert [a for a in text.splitlines() if "Hardware" not in a] == [
        a for a in output.read_text().splitlines() if "Hardware" not in a
    ]
