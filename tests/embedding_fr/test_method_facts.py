"""What an entry of ``METHODS`` says of its method is so."""

import dataclasses

import pytest
from test_embedding_contract import CASES, identify
from toy_federation import run, toy_federation, toy_method

from embedding_fr.local_only import local_only
from embedding_fr.merging import Merging
from embedding_fr.methods import METHODS

FORMS = [*CASES, ("fedease", {"secure": True}), ("fednear", {"secure": True})]


@pytest.mark.parametrize(("name", "variant"), FORMS, ids=identify)
def test_without_a_server_nothing_is_left_of_those_that_say_so(name, variant):
    entry, method = METHODS[name], local_only(toy_method(name, **variant), toy_federation())
    if entry.needs_server(entry.config(**variant)):
        with pytest.raises(ValueError, match="this method does not run with federation off"):
            run(method, rounds=1)
    else:
        run(method, rounds=1)


@pytest.mark.parametrize(("name", "variant"), FORMS, ids=identify)
def test_a_missing_client_ends_those_that_need_everyone(name, variant):
    entry = METHODS[name]
    if entry.needs_everyone(entry.config(**variant)):
        with pytest.raises(ValueError, match="got 4 of 7 uploads for the secure sum"):
            run(toy_method(name, **variant), rounds=1, participation=0.5)
    else:
        run(toy_method(name, **variant), rounds=1, participation=0.5)


@pytest.mark.parametrize("name", METHODS)
def test_only_a_method_with_clip_and_noise_of_its_own_says_what_it_guarantees(name):
    entry = METHODS[name]
    own = {"clip", "noise_scale"} <= {field.name for field in dataclasses.fields(entry.config)}
    assert (entry.guarantee is not None) == own
    assert entry.plug_in == (entry.config is Merging)
