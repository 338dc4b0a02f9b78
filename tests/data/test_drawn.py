"""Customers that are drawn: as many as asked for, the same with the same seed, alike at two clients."""

from dataclasses import replace

from fedecider.data.domain import Domain, Events
from fedecider.data.drawn import drawn_customers, num_drawn
from fedecider.data.sample import sample_domains


def test_a_client_keeps_a_hundred_customers_if_it_has_them():
    assert [num_drawn(number, 0.1) for number in (40, 100, 950, 2000, 2001)] == [40, 100, 100, 200, 201]


def test_the_draw_is_by_seed_and_key_and_keeps_whole_histories():
    domains = sample_domains(["crime", "comics"])
    crime = domains["crime"].clients
    rows = dict(zip(crime.users, crime.sequences, strict=True))
    drawn = drawn_customers(domains, 0.5)
    assert drawn["crime"].public is domains["crime"].public
    assert drawn["crime"].catalogue is domains["crime"].catalogue
    for name, domain in drawn.items():
        assert len(domain.clients.users) == num_drawn(len(domains[name].clients.users), 0.5)
        assert domain.card["clients"]["users"] == len(domain.clients.users)
        assert [
            user for user in domains[name].clients.users if user in set(domain.clients.users)
        ] == domain.clients.users
    for user, sequence in zip(drawn["crime"].clients.users, drawn["crime"].clients.sequences, strict=True):
        assert sequence == rows[user]
    assert drawn_customers(domains, 0.5)["crime"].clients.users == drawn["crime"].clients.users
    assert drawn_customers(domains, 1.0)["crime"] is domains["crime"]


def test_a_customer_of_two_clients_is_drawn_at_both_or_none():
    crime = sample_domains(["crime"])["crime"]
    again: Domain = replace(crime, name="again", clients=Events(*(part[::-1] for part in crime.clients[:2]), None))
    drawn = drawn_customers({"crime": crime, "again": again}, 0.6)
    assert set(drawn["crime"].clients.users) == set(drawn["again"].clients.users)
    assert len(drawn["crime"].clients.users) < len(crime.clients.users)
