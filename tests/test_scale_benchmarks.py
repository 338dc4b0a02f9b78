"""Benchmarks of growth, of public codes, of simulation engines and of validation, at sizes that say nothing."""

import io
import json
import math
import xml.etree.ElementTree as ElementTree

import evaluation_speed
import growth
import numpy as np
import peers
import public_codes
import pytest
import torch

POINT = growth.Point(1.0, 0.5, 20.0, 3000.0)


def test_an_exponent_is_the_slope_of_the_logarithms():
    sizes = (10, 20, 40)
    assert growth.exponent(sizes, [3.0 * size**2 for size in sizes]) == pytest.approx(2.0)
    assert growth.exponent(sizes, [7.0, 7.0, 7.0]) == pytest.approx(0.0)
    assert math.isnan(growth.exponent(sizes, [0.0, 1.0, 2.0]))
    assert math.isnan(growth.exponent(sizes, [0.004, 0.008, 0.016], growth.SHORT_S))


def test_a_steep_method_without_a_reason_is_marked():
    flat = growth.Row("fedmf", False, POINT, growth.Point(1.0, 1.0, 1.0, 0.0), POINT)
    steep = flat._replace(by_clients=growth.Point(1.6, math.nan, 1.0, 0.0))
    explained = steep._replace(method="fedem")
    lines = growth.table([flat, steep, explained])[2:]
    assert ["not explained" in line for line in lines] == [False, True, False]
    assert growth.PAIRS in lines[2]


def test_the_figure_is_an_svg_with_a_row_for_each_method():
    rows = [growth.Row(name, False, POINT, POINT, POINT) for name in ("fedmf", "fedavg")]
    root = ElementTree.fromstring(growth.figure(rows))
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"fedmf", "fedavg"} <= set(words)
    assert len(list(root.iter("{http://www.w3.org/2000/svg}circle"))) == 2


@pytest.mark.parametrize("measured", [("measure_embedding", "fedmf", 12, 60), ("measure_silos", "fedecider", 2, 40)])
def test_a_point_has_all_four_figures(measured):
    name, *size = measured
    point = getattr(growth, name)(*size)
    assert point.clients_s > 0
    assert point.server_s > 0
    assert point.bytes_each > 0
    assert point.megabytes >= 0


def test_more_silos_send_more_directions_to_each():
    few, many = (growth.measure_silos("fedecider", count, 40).bytes_each for count in (2, 4))
    assert many > 1.5 * few
    plain = [growth.measure_silos("fedavg", count, 40).bytes_each for count in (2, 4)]
    assert plain[0] == plain[1]


def test_a_side_answers_every_line_with_its_seconds(monkeypatch, capsys):
    asked = []

    def run(number):
        asked.append(number)
        return 0.25 * number, 0.0

    monkeypatch.setattr("sys.stdin", io.StringIO("\n\n"))
    public_codes.serve(run)
    first, *answers = capsys.readouterr().out.splitlines()
    assert first == "ready"
    assert [json.loads(line) for line in answers] == [[0.25, 0.0], [0.5, 0.0]]
    assert asked == [0, 1, 2]  # the first one is not counted


def test_the_plain_loop_of_the_engines_is_federated_averaging(tmp_path):
    for user, size in enumerate((3, 9)):
        items, labels = np.arange(size), (np.arange(size) % 2).astype(np.float32)
        np.savez(tmp_path / f"user-{user}.npz", items=items, labels=labels, sequence=items)
    case = peers.Case("loop", 2, 1, str(tmp_path), 12)
    start = peers.start_table(12)
    torch.manual_seed(0)
    first, count = peers.train_user(case, 0, start)
    assert count == 3
    assert np.array_equal(first[3:], start[3:])  # items that it has not
    assert not np.array_equal(first[:3], start[:3])
    own = np.load(tmp_path / "vector-0.npy")
    peers.train_user(case, 0, start)
    assert not np.array_equal(np.load(tmp_path / "vector-0.npy"), own)  # it goes on from where it was
    peers.loop(case)
    assert (tmp_path / "vector-1.npy").exists()


def test_the_parts_of_a_validation_are_compared_in_their_places_before_they_are_timed(tmp_path, monkeypatch):
    sizes = {"users": 60, "items": 90, "events": 9, "timed_users": 40, "eval_users": 20, "turns": 1}
    sizes |= {"views_users": 30, "views_items": 40}
    words = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    monkeypatch.setattr("sys.argv", ["evaluation_speed.py", *words, "--output", str(tmp_path / "found.md")])
    evaluation_speed.main()
    text = (tmp_path / "found.md").read_text()
    assert "| every user | 60 |" in text
    assert "| `--num_eval_users 20` | 20 |" in text
    assert [f"| {name} |" in text for name in ("fedmf", "fedncf", "fedrecgel")] == [True] * 3
    assert text.count("of 40 |") == 3
    assert "| perfedrec | personal, cluster, global |" in text
    federation = evaluation_speed.drawn_setup("fedncf", evaluation_speed.synthetic(60, 90, 9), 40)
    _, plain, now = evaluation_speed.pair("fedncf", federation)
    for block in federation.validated:
        assert (plain(block) - now(block)).abs().max() <= 1.0
