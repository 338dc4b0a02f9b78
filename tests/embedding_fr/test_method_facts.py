"""What an entry of ``METHODS`` says of its method is so."""

import pytest
from toy_federation import NUM_ITEMS, toy_training

from embedding_fr.audit import moves_of
from embedding_fr.methods import METHODS
from embedding_fr.results import privacy_text
from embedding_fr.setup import EmbeddingRunConfig, EmbeddingSettings
from embedding_fr.testing import EmbeddingBench
from embedding_fr.testing.contract import federation_off
from fedecider.data.interactions import InteractionsConfig
from fedecider.federation.config import DevicePrivacyConfig
from fedecider.federation.privacy import privacy_report
from fedecider.federation.wire import dense
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
    with pytest.raises(ValueError, match="got 4 of 7 uploads for the secure aggregation"):
        bench.run(bench.build(), 1, participation=0.5)


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("name", ["fedease", "fednear"])
def test_a_bound_that_leaves_nothing_of_a_client_is_told(name, secure):
    entry = METHODS[name]
    for clip, told in ((2e-4, False), (5e-5, True)):  # 2^-16 times 6, the norm of eight items, is 9e-5
        bench = EmbeddingBench(entry, entry.config(secure=secure, clip=clip))
        if told:
            with pytest.raises(ValueError, match="under which nothing of client 6 is counted"):
                bench.run(bench.build(), 1)
        else:
            bench.run(bench.build(), 1)


@pytest.mark.parametrize("name", [name for name, entry in METHODS.items() if entry.upload_rounds])
def test_an_epsilon_is_the_sum_over_rounds_with_uploads_alone(name):
    entry = METHODS[name]
    bench = EmbeddingBench(entry)
    _, records = bench.run(bench.build(), entry.upload_rounds + 1)
    sent = [any(group["up"] for group in record["traffic"]) for record in records]
    assert sent == [True] * entry.upload_rounds + [False]
    for method, rounds in ((name, entry.upload_rounds), ("fedmf", 3)):
        entry, bound = METHODS[method], {"clip": 1.0, "noise_scale": 2.0}
        plane = {"direction": 0.0} if method == "fednear" else {}
        own = entry.config(**bound, **plane) if entry.guarantee else entry.config()
        run, privacy = (
            EmbeddingRunConfig(method=method, num_rounds=3),
            DevicePrivacyConfig(mechanism="gaussian", **bound),
        )
        found = privacy_text(EmbeddingSettings(run, InteractionsConfig(), toy_training(method), privacy, own), 30)
        budget = privacy_report(privacy, rounds).split(":")[0]
        assert found.split(":")[0] == budget, method
        assert f"over {rounds} round(s)" in found


@pytest.mark.parametrize(
    ("name", "own", "elsewhere"),
    [
        *((name, {}, set()) for name in METHODS if name != "fedrecgel"),
        ("fedrecgel", {}, {"item_table.gradient", "item_table_mlp", "item_table_mlp.gradient"}),
        ("fedrecgel", {"variant": "code"}, set()),
    ],
)
def test_item_tables_are_those_tensors_whose_rows_are_items(name, own, elsewhere):
    """In the tiny setting nothing but a table has as many rows as there are items."""
    tables = METHODS[name].item_tables
    bench = EmbeddingBench(METHODS[name], METHODS[name].config(**own))
    method, found = bench.build(), set(elsewhere)

    def server_aggregate(round, server, uploads):
        found.update(name for name, tensor in server.items() if tensor.dim() == 2 and len(tensor) == NUM_ITEMS)
        kept = list(uploads)
        for upload in kept:
            download = method.broadcast(round, server, upload.clients)
            assert (moves_of(upload, download, NUM_ITEMS, tables) is None) == (name == "fednear"), "which sends lists"
            whole = dense(upload, download)
            found.update(n for n, t in whole.tensors.items() if t.dim() == 3 and t.shape[1] == NUM_ITEMS)
        return method.server_aggregate(round, server, iter(kept))

    bench.run(method._replace(server_aggregate=server_aggregate), 1)
    found.discard("attribute_table")  # of IFedRec's server: what its network makes, which no client uploads
    assert found == set(tables)
