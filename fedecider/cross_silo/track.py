"""The track of methods over domains with a language model, as the engine knows it."""

from fedecider.engine.track import Track
from fedecider.methods import METHODS

TRACK = Track(
    name="llm",
    title="the cross-silo track",
    description="Every domain is a client; missing stages (pre-training, distillation) are run first and kept.",
    methods=METHODS,
    is_config=lambda config: "ranking" in config,
    schema="fedecider.cross_silo.command_line:schema_of",
    settings="fedecider.cross_silo.command_line:make_settings",
    recorded="fedecider.cross_silo.command_line:recorded_settings",
    load="fedecider.cross_silo.federate:load",
    page="fedecider.cross_silo.page:report",
    choose="fedecider.cross_silo.auto:chosen_settings",
    conclusion="fedecider.cross_silo.conclusion:run_conclusion",
    over_runs="fedecider.cross_silo.seeds:over_runs",
    merge_runs="fedecider.cross_silo.seeds:merge_runs",
    comparison="fedecider.cross_silo.comparison:TABLE",
    audit="fedecider.cross_silo.audit:audit_llm",
    contract="fedecider.testing.llm_contract:bench_of",
    deployment="fedecider.deployment.llm:PARTS",
)
