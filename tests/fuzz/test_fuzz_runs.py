"""Files of an updated run with a bit flipped, cut off, emptied or gone: refused by name, or the answer is the same."""

import random
import shutil

import pytest
from slow import slow
from small_runs import later_purchases

from fedecider.cli.main import main
from fedecider.data.sample import sample_domains
from fedecider.lifecycle.update import counted
from fedecider.running.manifest import read_manifest

pytestmark = pytest.mark.whole
CRIME = sample_domains(["crime"], 0)["crime"]


@pytest.fixture(scope="module")
def run(two_clients_run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    run = shutil.copytree(two_clients_run / "runs" / "whole", folder / "run")
    words = ["update", "--run", run, "--company", "crime", "--events", later_purchases(folder), "--force", "true"]
    assert main([str(word) for word in words]) == 0
    return run


def read_by_crime(run):
    """The files that an update or a list of the company reads, of the version in force; and the manifests."""
    version = run / "versions" / "2"
    parts = ("backbone/", "adapters/crime/", "private/crime/", "run.json", "version.json")
    names = [name for name in read_manifest(version).files if name.startswith(parts)]
    return [*(version / name for name in names), version / "manifest.json", run / "manifest.json"]


HOW = {
    "flip": lambda content, draw: flipped(content, draw.randrange(8 * len(content))),
    "cut": lambda content, draw: content[: draw.randrange(len(content))],
    "empty": lambda content, draw: b"",
    "gone": lambda content, draw: None,
}


def flipped(content, bit):
    data = bytearray(content)
    data[bit // 8] ^= 1 << bit % 8
    return bytes(data)


def damage(path, how, draw):
    """What the file was."""
    content = path.read_bytes()
    path.unlink()
    if (changed := HOW[how](content, draw)) is not None:
        path.write_bytes(changed)
    return content


def answer(run):
    now = counted(run, "crime")
    return now.run.root, now.keys, now.histories.customers, list(now.histories.sequences), now.ensemble.alone


def test_no_flipped_bit_of_the_histories_is_read(run):
    """Of 400 flips 135 were once read as other items, times or customers."""
    (path,) = (one for one in read_by_crime(run) if one.name == "histories.parquet")
    content, draw = path.read_bytes(), random.Random("histories")
    for _ in range(400):
        path.write_bytes(flipped(content, draw.randrange(8 * len(content))))
        with pytest.raises(ValueError, match=r"histories\.parquet was changed"):
            counted(run, "crime")
    path.write_bytes(content)
    counted(run, "crime")


@pytest.mark.parametrize("num", [60, slow(400)])
def test_a_damaged_file_is_refused_by_name_or_says_the_same(run, num):
    expected, draw, refused = answer(run), random.Random("files"), 0
    for _ in range(num):
        path, how = draw.choice(read_by_crime(run)), draw.choice(sorted(HOW))
        content = damage(path, how, draw)
        try:
            said = answer(run)
        except (ValueError, FileNotFoundError) as error:
            said = str(error)
        path.write_bytes(content)
        if said != expected:
            refused += 1
            assert isinstance(said, str), (path, how)
            assert path.name in said, (path, how, said)
            assert "\n" not in said
    assert refused > 0.9 * num


@pytest.mark.parametrize("num", [6, slow(40)])
def test_commands_end_with_one_line(run, num, tmp_path, capsys):
    draw = random.Random("commands")
    for _ in range(num):
        path, how = draw.choice(read_by_crime(run)), draw.choice(sorted(HOW))
        content = damage(path, how, draw)
        words = ["recommend", "--run", str(run), "--company", "crime", "--customers", CRIME.clients.users[3]]
        code, error = main(words), capsys.readouterr().err
        path.write_bytes(content)
        assert code == 0 or (code == 2 and error.startswith("error: ") and error.count("\n") == 1), (path, how, error)
