"""Baskets of order numbers or times: from tables to prepared folders and back, and what is odd about them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedecider.cli.main import main
from fedecider.data.domain import Events
from fedecider.data.frames import from_events
from fedecider.data.sellers import by_catalogue
from fedecider.data.silos import share_out
from fedecider.data.sites import own_users, publish
from fedecider.data.store import load_domains, save_domains
from fedecider.evaluation.protocols import histories, targets, train_parts
from fedecider.evaluation.sequences import SequenceArray

THINGS = [{"item": one, "title": f"Thing {one}"} for one in "abcde"]


def row(user, item, day, order=None, hour=12):
    return {"user": user, "item": item, "time": f"2024-{1 + day // 28:02d}-{1 + day % 28:02d} {hour}:00", "nr": order}


ROWS = [
    # two orders of one morning, whose lines are mixed; b stands twice in the first one
    row("u", "c", 1, "1", hour=10),
    row("u", "a", 1, "2", hour=11),
    row("u", "b", 1, "1", hour=12),
    row("u", "b", 1, "1", hour=12),
    row("u", "d", 2, "3"),
    row("u", "a", 2, "3"),
    # no order number: by time
    row("u", "e", 3),
    row("u", "b", 3),
    row("u", "e", 4),
    row("v", "a", 1, "7"),
    row("v", "c", 5, "8"),
    row("v", "b", 6, "9"),
]


def csv_of(name, rows, folder):
    lines = [",".join(rows[0]), *(",".join(str(one or "") for one in line.values()) for line in rows)]
    (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")


def in_baskets(domain, user):
    """The keys of a user's items, a list for each basket."""
    place = domain.clients.users.index(user)
    rows = domain.clients.arrays().sequences.take([place])
    found = []
    for item, is_new in zip(rows.value_E.tolist(), rows.is_new_basket_E.tolist(), strict=True):
        found += [[]] if is_new else []
        found[-1].append(domain.item_keys[item])
    return found


def test_events_of_one_order_number_are_one_basket_and_an_item_counts_once_in_it():
    data = from_events(ROWS, THINGS, order="nr")
    assert in_baskets(data["shop"], "u") == [["c", "b"], ["a"], ["d", "a"], ["e", "b"], ["e"]]
    assert in_baskets(data["shop"], "v") == [["a"], ["c"], ["b"]]
    told = str(data.report)
    assert "further rows of an item in one order (1 event)" in told
    assert "8 baskets by order number" in told


def test_without_order_numbers_events_of_one_time_are_one_basket():
    data = from_events(ROWS, THINGS)
    assert in_baskets(data["shop"], "u") == [["c"], ["a"], ["b", "b"], ["d", "a"], ["e", "b"], ["e"]]
    assert targets(data["shop"].clients.sequences, "valid")[0] == [data["shop"].item_keys.index(one) for one in "eb"]
    untied = [one for one in ROWS if one["user"] == "v"] + [row("w", one, day) for day, one in enumerate("abc")]
    assert from_events(untied, THINGS)["shop"].clients.arrays().sequences.basket_E is None
    untimed = [{**one, "time": None} for one in ROWS]
    plain = from_events([{k: v for k, v in one.items() if k not in ("time", "nr")} for one in untimed], THINGS)
    assert plain["shop"].clients.arrays().sequences.basket_E is None


def test_customers_with_few_baskets_stay_and_are_counted():
    data = from_events([*ROWS, *(row("w", one, 9) for one in "abcd")], THINGS)
    assert in_baskets(data["shop"], "w") == [["a", "b", "c", "d"]]
    assert "1 of the customers have fewer than 3, whom the protocol next_basket leaves out" in str(data.report)


def test_baskets_go_into_a_folder_and_come_back(tmp_path):
    domain = from_events(ROWS, THINGS, order="nr")["shop"]
    plain = replace(domain, clients=domain.clients._replace(sequences=list(domain.clients.sequences)))
    assert domain.content_hash() != plain.content_hash()
    save_domains({"shop": domain}, tmp_path)
    back = load_domains(tmp_path)["shop"]
    assert in_baskets(back, "u") == in_baskets(domain, "u")
    assert back.content_hash() == domain.content_hash() == back.card["content_hash"]
    save_domains({"shop": plain}, tmp_path)
    assert load_domains(tmp_path)["shop"].clients.arrays().sequences.basket_E is None
    cut = Events(*domain.clients)._replace(sequences=domain.clients.arrays().sequences.newest(4), timestamps=None)
    shifted = SequenceArray(cut.sequences.start_U, cut.sequences.value_E, basket_E=cut.sequences.basket_E + 5)
    one, other = (replace(domain, clients=cut._replace(sequences=rows)) for rows in (cut.sequences, shifted))
    assert one.content_hash() == other.content_hash()  # how baskets are numbered says nothing


def test_what_cuts_events_keeps_their_baskets():
    domain = from_events(ROWS, THINGS, order="nr")["shop"]
    number_I = np.array([0, 1, -1, 2, 3])  # without c
    assert domain.clients.renumbered(number_I).users == ["u"]
    rows = domain.clients.renumbered(number_I).arrays().sequences
    assert rows[0] == [1, 0, 2, 0, 3, 1, 3]
    assert rows.baskets[0] == [0, 1, 2, 2, 3, 3, 4]
    assert train_parts(rows)[0] == [1, 0, 2, 0]
    assert histories(rows, "test")[0] == [1, 0, 2, 0, 3, 1]
    everybody = [
        {**one, "user": f"{one['user']}{i}", "nr": one["nr"] and f"{i}{one['nr']}"} for i in range(4) for one in ROWS
    ]
    silos = share_out({"shop": from_events(everybody, THINGS)["shop"]}, 2, None, seed=0)
    assert all(silo.clients.arrays().sequences.basket_E is not None for silo in silos.values())
    companies = dict.fromkeys(("north", "south"), everybody)
    shared = from_events(companies, dict.fromkeys(companies, THINGS), public=0.5, order="nr", catalogue="ean", seed=3)
    whole = by_catalogue(shared)["ean"].whole.public
    public = {user: rows for one in shared.values() for user, rows in zip(*one.public.arrays()[:2], strict=True)}
    assert whole.num_events == sum(map(len, public.values()))
    assert sum(whole.arrays().sequences.num_baskets_U) == sum(
        int(one.public.arrays().sequences.num_baskets_U.sum()) for one in shared.values()
    )


def test_order_numbers_of_two_customers_or_far_apart_are_named(tmp_path, capsys):
    many = [row(f"p{number}", item, number % 7, f"n{number}") for number in range(30) for item in "abc"]
    odd = [*ROWS, *many, row("v", "d", 6, "3"), row("v", "e", 200, "9")]
    data = from_events(odd, THINGS, order="nr")
    first, second = data.report.lines()[:2]
    of = "WARNING: 1 of 36 order numbers (column 'nr')"
    assert first.startswith(f"{of} belong to several customers, such as 3 to u and v")
    assert second.startswith(f"{of} have rows more than 31 days apart, such as 9 with 211 days")
    assert in_baskets(data["shop"], "v") == [["a"], ["c"], ["b"], ["d"], ["e"]]
    with pytest.raises(ValueError, match=r"3 of 6 order numbers .* belong to several customers.*leave order out"):
        from_events([*ROWS, *(row("v", "d", 9, str(number)) for number in (1, 2, 3))], THINGS, order="nr")
    csv_of("events", [*ROWS, row("v", "d", 1, "1")], tmp_path)
    csv_of("items", THINGS, tmp_path)
    words = ["import", str(tmp_path / "events.csv"), "--items", str(tmp_path / "items.csv"), "--output", str(tmp_path)]
    words += ["--company", "shop"]
    assert main([*words, "--order", "nr"]) == 2
    assert not (tmp_path / "shop").exists()
    assert "order numbers (column 'nr') belong to several customers" in capsys.readouterr().err
    assert main(words) == 0


def test_a_site_prepares_baskets_of_its_own_table(tmp_path):
    publish(None, THINGS, tmp_path, companies=["north", "south"])
    domain = own_users(ROWS, tmp_path, "shop.north", time="time", order="nr")
    assert in_baskets(domain, "u") == [["c", "b"], ["a"], ["d", "a"], ["e", "b"], ["e"]]
    assert domain.card["baskets"] == "by order number"
