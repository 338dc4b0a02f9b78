"""Tracks: what each one says of itself is true, and asking costs no library."""

import subprocess
import sys

import pytest

from fedecider.engine.track import Track, all_method_names, track_of, tracks
from fedecider.testing import bench_of

PARTS = [(track, part) for track in tracks() for part in Track._fields[6:] if getattr(track, part)]
PROGRAM = """
import sys
from fedecider.engine.track import all_method_names, track_of
assert {track_of(name).name for name in all_method_names()} == {"llm", "id", "embedding"}
print(*{"torch", "transformers", "numba", "pandas"} & set(sys.modules))
"""


def test_the_three_of_this_project_are_installed():
    assert {track.name for track in tracks()} >= {"llm", "id", "embedding"}


@pytest.mark.parametrize(("track", "name"), PARTS, ids=[f"{track.name}-{part}" for track, part in PARTS])
def test_every_part_is_there(track, name):
    assert track.part(name) is not None


@pytest.mark.parametrize("track", tracks(), ids=lambda track: track.name)
def test_the_names_are_those_of_the_methods(track):
    assert all(isinstance(track.methods[name], track.methods.kind) for name in track.methods.built_in)


def test_no_two_tracks_have_a_method_of_one_name():
    names = list(all_method_names())
    assert len(names) == len(set(names))
    assert all(name in track_of(name).method_names for name in names)


def test_the_track_of_a_method_is_found_without_its_libraries():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    assert not done.stdout.split()


@pytest.mark.parametrize("name", ["fedavg", "fedsasrec", "fedmf"])
def test_a_contract_is_found_by_name_and_by_entry(name):
    """An entry is recognised by its type."""
    track = track_of(name)
    entry = track.methods[name]
    (bench, contract), (same, _) = bench_of(entry), bench_of(name)
    assert bench.entry is same.entry is entry
    assert contract is track.part("contract")(entry, None)[1]


def test_what_is_no_method_has_no_contract():
    for other in ("fedavgg", track_of("fedavg"), 3):
        with pytest.raises(ValueError, match="expected the name of a method"):
            bench_of(other)
    with pytest.raises(ValueError, match="pools the data"):
        bench_of("centralised")
