"""The cross-device track, as the engine knows it: every user of a rating data set is a client."""

from embedding_fr.methods import METHODS
from fedecider.engine.track import Track

TRACK = Track(
    name="embedding",
    title="the cross-device track",
    description="Every user of a rating data set is a client.",
    methods=METHODS,
    is_config=lambda config: "training" in config and "ranking" not in config,
    schema="embedding_fr.commands:schema_of",
    settings="embedding_fr.commands:make_settings",
    recorded="embedding_fr.commands:settings_of_run",
    load="embedding_fr.run:load",
    page="embedding_fr.page:report",
    conclusion="embedding_fr.page:run_conclusion",
    data_options="embedding_fr.run:data_options",
    comparison="embedding_fr.leaderboard:TABLE",
    audit="embedding_fr.audit:audit_embedding",
    contract="embedding_fr.testing.contract:bench_of",
    deployment="embedding_fr.deployment:PARTS",
)
