"""`fedecider.testing` finds what is wrong: each part of the contract refuses a method that breaks it, in a sentence."""

import sys

import pytest
import torch
from outside import EXAMPLE
from settings_mutants import wrong_settings
from slow import slow

from embedding_fr.methods import METHODS
from embedding_fr.testing import EMBEDDING_CONTRACT
from fedecider.federation.method import Upload
from fedecider.federation.streams import stream
from fedecider.testing import bench_of, check_method
from fedecider.testing.llm_contract import LLM_CONTRACT, LlmBench

sys.path.insert(0, str(EXAMPLE))
from fedecider_interpolated import fedbias, interpolated

pytestmark = pytest.mark.whole

MUTANTS = {"llm": {}, "embedding": {}}
"""Track -> name of a part of the contract, and what is wrong -> entry, pattern of the sentence."""


def mutant(track, part, pattern):
    """The function below changes a built method: ``change(method, models or federation)`` -> fields to replace."""

    def keep(change):
        entry = interpolated.METHOD if track == "llm" else fedbias.METHOD

        def build(place, *rest):
            method = (entry.algorithm if track == "llm" else entry.build)(place, *rest)
            return method._replace(**change(method, place))

        broken = entry._replace(**{"algorithm" if track == "llm" else "build": build})
        MUTANTS[track][part, change.__name__] = broken, pattern
        return change

    return keep


def wrapped_update(method, change):
    """``client_update`` whose upload goes through ``change(upload, round, block)``."""

    def client_update(round, download, own, block):
        upload, new, logs = method.client_update(round, download, own, block)
        return change(upload, round, block), new, logs

    return {"client_update": client_update}


def wrapped_server(method, change):
    """``server_aggregate`` of uploads that went through ``change(upload)``."""
    return {
        "server_aggregate": lambda round, server, uploads: method.server_aggregate(
            round, server, (change(upload) for upload in uploads)
        )
    }


def finite_numbers(upload):
    """The upload with 0 and the like where it is not finite."""
    return upload._replace(
        tensors={name: torch.nan_to_num(tensor, 0.0, 1.0) for name, tensor in upload.tensors.items()}
    )


def shifted(upload, value):
    """The first tensor of an upload, with ``value`` (C,) added to each client's part."""
    name = min(upload.tensors)
    tensor = upload.tensors[name]
    return upload._replace(tensors={**upload.tensors, name: tensor + value.view(-1, *[1] * (tensor.dim() - 1))})


for track in ("llm", "embedding"):

    @mutant(track, "no_hidden_state", "a second run with the same functions is not the first one again")
    def counts_its_calls(method, place):
        calls = []
        return wrapped_update(
            method, lambda upload, round, block: calls.append(1) or shifted(upload, torch.full((1,), 1e-3 * len(calls)))
        )

    @mutant(track, "resume", "a resumed run is not the uninterrupted one")
    def remembers_the_last_round_outside_trees(method, place):
        seen = {}

        def aggregate(round, server, uploads):
            after = method.server_aggregate(round, server, uploads)
            seen[round] = {name: tensor.clone() for name, tensor in after.items()}
            return {name: tensor + 0.01 * seen.get(round - 1, after)[name] for name, tensor in after.items()}

        return {"server_aggregate": aggregate}

    @mutant(track, "uploads", r"names of the local tree: what is local never leaves a client")
    def sends_what_is_local(method, place):
        name = min(method.init()[1])
        return wrapped_update(
            method,
            lambda upload, round, block: upload._replace(
                tensors={**upload.tensors, name: torch.zeros(len(upload.clients), 2)}
            ),
        )

    @mutant(track, "uploads", r"for \d clients: it must lead with a row per client of the block")
    def sends_one_row_for_all(method, place):
        return wrapped_update(
            method,
            lambda upload, round, block: upload._replace(
                tensors={name: tensor[:1] for name, tensor in upload.tensors.items()}
            ),
        )

    @mutant(track, "same_seed_same_bits", "it draws from the global generator of torch: draw from fedecider")
    def draws_from_the_global_generator(method, place):
        return wrapped_update(
            method, lambda upload, round, block: shifted(upload, 1e-3 * torch.randn(len(upload.clients)))
        )

    @mutant(track, "same_seed_same_bits", "two runs with the same seed are not equal")
    def draws_from_a_generator_without_seed(method, place):
        generator = torch.Generator()
        generator.seed()
        return wrapped_update(
            method,
            lambda upload, round, block: shifted(upload, torch.randn(len(upload.clients), generator=generator)),
        )

    @mutant(track, "own_data_alone", r"client \d sends other .* in company than alone")
    def adds_what_its_block_has(method, place):
        return wrapped_update(
            method,
            lambda upload, round, block: shifted(upload, upload.clients.float() - upload.clients.float().mean()),
        )

    @mutant(track, "block_size", "clients that share a block give another result")
    def logs_the_size_of_its_block(method, place):
        def client_update(round, download, own, block):
            upload, new, logs = method.client_update(round, download, own, block)
            return upload, new, [{**log, "company": len(logs)} for log in logs]

        return {"client_update": client_update}

    @mutant(track, "one_stream", "it reads them more than once|cannot read the uploads as a stream")
    def reads_the_uploads_twice(method, place):
        def aggregate(round, server, uploads):
            if sum(len(upload.clients) for upload in uploads) == 0:
                return server
            return method.server_aggregate(round, server, uploads)

        return {"server_aggregate": aggregate}

    @mutant(track, "one_stream", r"cannot read the uploads as a stream \(object of type 'generator' has no len")
    def asks_for_the_number_of_uploads(method, place):
        return {
            "server_aggregate": lambda round, server, uploads: (
                method.server_aggregate(round, server, uploads) if len(uploads) else server
            )
        }

    @mutant(track, "non_finite_uploads", "are others after an upload with nan everywhere than without its client")
    def takes_every_number(method, place):
        def aggregate(round, server, uploads):
            sums = [{name: one.tensors[name].sum(dtype=torch.float32) for name in server} for one in uploads]
            return {name: tensor + 1e-3 * sum(one[name] for one in sums) for name, tensor in server.items()}

        return {"server_aggregate": aggregate}

    @mutant(track, "non_finite_uploads", "are others after an upload with nan everywhere than without its client")
    def takes_zeros_for_what_is_not_finite(method, place):
        return wrapped_server(method, finite_numbers)

    @mutant(track, "non_finite_uploads", "are others after an upload with inf everywhere than without its client")
    def looks_for_nan_alone(method, place):
        def cleaned(upload):
            nan = any(bool(tensor.isnan().any()) for tensor in upload.tensors.values())
            return upload if nan else finite_numbers(upload)

        return wrapped_server(method, cleaned)

    @mutant(track, "non_finite_uploads", "are others after an upload with one inf in .* than without its client")
    def takes_the_other_tensors_of_a_client(method, place):
        def cleaned(upload):
            some = any(bool(tensor.isfinite().any()) for tensor in upload.tensors.values())
            return finite_numbers(upload) if some else upload

        return wrapped_server(method, cleaned)

    @mutant(track, "arguments_stay", "client_update writes into its download")
    def writes_into_its_download(method, place):
        def client_update(round, download, own, block):
            done = method.client_update(round, download, own, block)
            for tensor in download.shared.values():
                tensor += 1.0
            return done

        return {"client_update": client_update}

    @mutant(track, "arguments_stay", r"client_update writes into the own rows \['.*'\] that it is given")
    def zeroes_the_own_rows_that_it_is_given(method, place):
        def client_update(round, download, own, block):
            done = method.client_update(round, download, {name: rows.clone() for name, rows in own.items()}, block)
            for rows in own.values():
                rows.zero_()
            return done

        return {"client_update": client_update}

    @mutant(track, "arguments_stay", "the server's .* are written in place")
    def writes_into_the_server(method, place):
        def aggregate(round, server, uploads):
            for name, tensor in method.server_aggregate(round, server, uploads).items():
                server[name].copy_(tensor)
            return server

        return {"server_aggregate": aggregate}

    @mutant(track, "absent_clients", r"client \d was absent, and its .* changed")
    def writes_rows_of_others(method, place):
        server, local = method.init()
        mine = {name: tensor.clone() for name, tensor in local.items()}

        def client_update(round, download, own, block):
            upload, new, logs = method.client_update(round, download, own, block)
            return upload, {name: RowsOfAll(rows) for name, rows in new.items()}, logs

        return {"init": lambda: (server, mine), "client_update": client_update}

    @mutant(track, "positions", r"places have the shape \(\d, 1\), expected \(\d,\)")
    def places_of_two_dimensions(method, place):
        return {"positions": lambda *given: [found[:, None] for found in method.positions(*given)]}

    @mutant(track, "positions", "lists for")
    def places_of_all_in_one_list(method, place):
        return {"positions": lambda *given: [torch.cat(method.positions(*given)), torch.zeros(1)]}

    @mutant(track, "positions", "gives every held-out item of every client the place 0")
    def ranks_everything_first(method, place):
        return {"positions": lambda *given: [torch.zeros_like(found) for found in method.positions(*given)]}

    @mutant(track, "upload_like", "upload_like is not what is sent in round 1")
    def says_that_other_things_are_sent(method, place):
        return {"upload_like": lambda round, server: {"other": torch.zeros(2)}}

    @mutant(track, "trees", r"the local tensors \['.*'\] do not lead with one row per client")
    def keeps_a_row_for_nobody(method, place):
        return {"init": lambda: (method.init()[0], {name: tensor[:-1] for name, tensor in method.init()[1].items()})}

    @mutant(track, "bytes_counted", "is no number of bytes for each client")
    def says_a_wrong_payload(method, place):
        return wrapped_update(
            method, lambda upload, round, block: upload._replace(payload={min(upload.tensors): torch.tensor(7)})
        )


class RowsOfAll:
    """Stands for new own rows and writes into all rows of the tree, not those of its clients alone."""

    def __init__(self, rows):
        self.rows = rows

    def to(self, tree):
        tree += 1.0
        return self.rows.to(tree)


@mutant("llm", "order_of_clients", "depends on its place among the clients")
def draws_by_the_number_of_the_client(method, models):
    def noise(round, clients):
        return torch.stack([torch.randn((), generator=stream(0, "noise", round, one)) for one in clients.tolist()])

    return wrapped_update(method, lambda upload, round, block: shifted(upload, noise(round, upload.clients)))


@mutant("llm", "unsent_rows", r"client \d does not send some rows of lm_head.lora_b, and they are others with it")
def reads_unsent_rows_as_zeros(method, models):
    return wrapped_server(method, lambda upload: upload._replace(sent_rows={}))


@mutant("llm", "base_stays", "it changes weights of the base")
def trains_the_base(method, models):
    def client_update(round, download, own, block):
        with torch.no_grad():
            next(one for one in models.base.model.parameters() if not one.requires_grad).add_(1e-3)
        return method.client_update(round, download, own, block)

    return {"client_update": client_update}


@mutant("llm", "diverged_training", "gets other own rows")
def keeps_what_is_not_finite(method, models):
    def client_update(round, download, own, block):
        upload, new, logs = method.client_update(round, download, own, block)
        return upload, {name: upload.tensors[name[4:]] for name in new}, logs

    return {"client_update": client_update}


@mutant("llm", "another_rank", "adapters of another rank are trained")
def trains_adapters_of_any_rank(method, models):
    def client_update(round, download, own, block):
        try:
            return method.client_update(round, download, own, block)
        except ValueError:
            return Upload(block.clients, torch.ones(1), {}), own, [{}]

    return {"client_update": client_update}


def wrong_entries():
    """Parts that look at the entry itself: (part, what is wrong) -> entry, pattern."""
    llm, embedding = interpolated.METHOD, fedbias.METHOD

    def local_model(models, config, variant, download, own, client):
        return interpolated.client_model(models, config, "local", download, own, client)

    def build_without_seed(federation, training, config):
        return fedbias.fedbias(federation._replace(seed=0), training, config)

    def peeking(federation, training, config):
        method = fedbias.fedbias(federation, training, config)

        def client_update(round, download, own, block):
            upload, new, logs = method.client_update(round, download, own, block)
            return shifted(upload, block.data.test_C.float()), new, logs

        return method._replace(client_update=client_update)

    def in_memory_only(federation, training, config):
        method = fedbias.fedbias(federation, training, config)
        return method._replace(
            init=lambda: (method.init()[0], {n: t + (federation.table_bytes == 1) for n, t in method.init()[1].items()})
        )

    return {
        **wrong_settings(llm, embedding),
        ("scalars", "half"): (llm._replace(scalars=lambda *given: (0, 0)), r"scalars says 0 bytes down of client 0"),
        ("scalars_of_silos", "whole tables"): (
            llm._replace(
                scalars=lambda shapes, peers, round: interpolated.METHOD.scalars(WHOLE.setdefault(0, shapes), peers, 1)
            ),
            r"scalars says \d+ bytes down of client 1 in round 1, and \d+ travel",
        ),
        ("client_model", "other model"): (
            llm._replace(client_model=local_model),
            "client_model of mixed gives client 0 another",
        ),
        ("same_seed_same_bits", "no seed"): (
            embedding._replace(build=build_without_seed),
            "another seed changes nothing",
        ),
        ("held_out_items", "peeks"): (embedding._replace(build=peeking), "under strict what is held out changes"),
        ("tables_in_files", "other start"): (embedding._replace(build=in_memory_only), "personal tables in files give"),
        ("federation_off", "runs"): (
            embedding._replace(needs_server=lambda config: True),
            "needs_server says that federation cannot be off, and the method runs all the same",
        ),
        ("equal_weights", "by users' events"): (
            METHODS["fedncf"]._replace(equal_weights=lambda config: True),
            "equal_weights says that clients weigh alike, and their weights change the server's",
        ),
        ("absent_clients", "goes on"): (
            embedding._replace(needs_everyone=lambda config: True),
            "needs_everyone says that nobody may be absent, and the method goes on all the same",
        ),
    }


WHOLE = {}
"""Shapes of the first client that was asked for."""
CASES = [(part, entry, pattern) for one in MUTANTS.values() for (part, _), (entry, pattern) in one.items()]
NAMES = [f"{track}-{part}-{what}" for track, one in MUTANTS.items() for part, what in one]
OTHERS = [(part, entry, pattern) for (part, _), (entry, pattern) in wrong_entries().items()]
OTHER_NAMES = [f"{part}-{what}" for part, what in wrong_entries()]


@pytest.mark.parametrize(("part", "entry", "pattern"), [*CASES, *OTHERS], ids=[*NAMES, *OTHER_NAMES])
def test_each_part_of_the_contract_refuses_what_breaks_it(part, entry, pattern):
    bench, contract = bench_of(entry)
    (check,) = (one for one in contract if one.__name__ == part)
    with pytest.raises(AssertionError, match=pattern):
        check(bench)


@pytest.mark.parametrize("contract", [LLM_CONTRACT, EMBEDDING_CONTRACT], ids=["llm", "embedding"])
def test_no_part_of_the_contract_is_without_a_mutant(contract):
    assert {one.__name__ for one in contract} <= {part for part, _, _ in [*CASES, *OTHERS]}
    assert all(one.__doc__.endswith(".") for one in contract)


@pytest.mark.parametrize(
    ("track", "part", "what"),
    [
        ("embedding", "uploads", "sends_what_is_local"),
        ("embedding", "no_hidden_state", "counts_its_calls"),
        ("llm", "uploads", "sends_one_row_for_all"),
        slow("llm", "order_of_clients", "draws_by_the_number_of_the_client"),
        slow("embedding", "one_stream", "reads_the_uploads_twice"),
    ],
)
def test_check_method_says_which_contract_is_broken(track, part, what):
    entry, pattern = MUTANTS[track][part, what]
    with pytest.raises(AssertionError, match=rf"{part}: .*({pattern}).*\. The contract: "):
        check_method(entry)


def test_a_first_look_finds_an_aggregator_that_reads_unsent_rows_as_zeros(monkeypatch):
    entry, pattern = MUTANTS["llm"]["unsent_rows", "reads_unsent_rows_as_zeros"]
    rounds = []
    monkeypatch.setattr(LlmBench, "run", lambda *given, **options: rounds.append(given))
    with pytest.raises(AssertionError, match=rf"unsent_rows: .*{pattern}"):
        check_method(entry, quick=True)
    assert not rounds


def test_what_a_method_raises_is_a_breach_too():
    def build(federation, training, config):
        return fedbias.fedbias(federation, training, config)._replace(variants=lambda: None)

    with pytest.raises(AssertionError, match=r"trees: it raises TypeError: .*The contract: What the run starts from"):
        check_method(fedbias.METHOD._replace(build=build))


def test_what_is_no_federated_method_is_refused():
    with pytest.raises(ValueError, match="got 'nothing', expected the name of a method"):
        check_method("nothing")
    with pytest.raises(ValueError, match="got a method that pools the data of all clients"):
        check_method("centralised")
