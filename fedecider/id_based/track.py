"""The track of methods over domains with item IDs alone, as the engine knows it."""

from fedecider.engine.track import Track
from fedecider.id_based import METHODS

TRACK = Track(
    name="id",
    title="the track of ID-based methods",
    description="Every prepared domain or silo is a client, and models know item IDs alone: no language model.",
    methods=METHODS,
    is_config=lambda config: not {"ranking", "training"} & set(config),
    schema="fedecider.id_based.run:schema_of",
    settings="fedecider.id_based.run:make_settings",
    recorded="fedecider.id_based.run:recorded_settings",
    load="fedecider.id_based.run:load",
    page="fedecider.id_based.run:page",
    comparison="fedecider.id_based.run:TABLE",
    contract="fedecider.testing.id_contract:bench_of",
)
