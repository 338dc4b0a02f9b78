"""The page of the leaderboard on a few users: where each column comes from, and settings that are written and read."""

import leaderboard
import pytest

from fedecider.federation.record import read_json

ROUNDS = ("--num_rounds", "3", "--patience", "2", "--seeds", "2", "--published_rounds", "4")
ROWS = "popularity,memoriser,ease,fedmf"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("page")
    raw = root / "raw"
    raw.mkdir()
    rows = [f"u{user},i{(17 * user + 31 * place) % 300:03d},5,{place}" for user in range(30) for place in range(10)]
    (raw / "ratings.dat").write_text("\n".join([*rows, *(f"x,i{item:03d},5,{item}" for item in range(0, 300, 20))]))
    where = ["--work", root / "work", "--output", root / "page.md", "--chosen", root / "chosen", "--source"]
    words = [
        str(word) for word in (*where, "amazon_ratings", "--dataset", "toy", "--raw", raw, "--methods", ROWS, *ROUNDS)
    ]
    leaderboard.main([*words, "--tune", "4"])
    return root, words


def lines_of(root):
    lines = (root / "page.md").read_text().splitlines()
    return lines, {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ") for line in lines if "| " in line}


def test_every_column_is_that_of_its_protocol(made):
    root, _ = made
    lines, rows = lines_of(root)
    assert lines[2].startswith("## toy: ")
    header = rows["row"]
    assert header[-4:] == ["`strict/sampled99`", "`paper`", "`isolated99`", "`paper`, best test round"]
    assert {len(rows[name]) for name in ROWS.split(",") if name != "ease"} == {len(header)}
    strict = {(one["row"], one["protocol"]): one for one in read_json(root / "work/toy/leaderboard.json")["rows"]}
    paper = {
        (one["row"], one["protocol"]): one for one in read_json(root / "work/toy-published/leaderboard.json")["rows"]
    }
    value = strict["fedmf", "strict"]["values"]["macro"]["ndcg@10"]["mean"]
    assert rows["fedmf"][3].startswith(f"{value:.3f} [")
    for place, protocol in ((-3, "paper"), (-2, "isolated99")):
        metrics = paper["fedmf", protocol]["values"]["macro"]
        assert rows["fedmf"][place] == f"{metrics['hit@10']['mean']:.3f} / {metrics['ndcg@10']['mean']:.3f}"
    best = float(rows["fedmf"][-1].split(" / ")[1].strip(" |"))
    assert best >= float(rows["fedmf"][-3].split(" / ")[1])
    assert "ease" not in {name for name, _ in paper}, "papers' protocols are for federated rows"
