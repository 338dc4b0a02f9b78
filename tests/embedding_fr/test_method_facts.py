"""What an entry of ``METHODS`` says of its method is so."""

import dataclasses

import pytest

from embedding_fr.merging import Merging
from embedding_fr.methods import BUILT_IN as METHODS
from fedecider.testing import EmbeddingBench
from fedecider.testing.embedding_contract import federation_off
from fedecider.testing.shared_contract import absent_clients


@pytest.mark.parametrize("part", [federation_off, absent_clients], ids=lambda part: part.__name__)
@pytest.mark.parametrize("name", ["fedease", "fednear"])
def test_sums_of_strangers_need_a_server_and_everyone(name, part):
    """What other forms say is held by the contract."""
    entry = METHODS[name]
    bench = EmbeddingBench(entry, entry.config(secure=True))
    assert bench.needs_everyone
    assert entry.needs_server(bench.config)
    part(bench)
    with pytest.raises(ValueError, match="got 4 of 7 uploads for the secure sum"):
        bench.run(bench.build(), 1, participation=0.5)


@pytest.mark.parametrize("name", METHODS)
def test_only_a_method_with_clip_and_noise_of_its_own_says_what_it_guarantees(name):
    entry = METHODS[name]
    own = {"clip", "noise_scale"} <= {field.name for field in dataclasses.fields(entry.config)}
    assert (entry.guarantee is not None) == own
    assert entry.plug_in == (entry.config is Merging)
