"""The track of methods over domains with a language model, as the engine knows it."""

from fedecider.experiment.track import Track

TRACK = Track(
    name="llm",
    title="the cross-silo track",
    description="Every domain is a client; missing stages (pre-training, distillation) are run first and kept.",
    built_in=(
        "fedecider",
        "local",
        "fedavg",
        "flora",
        "ditto",
        "fdlora",
        "fedprox",
        "pfedavg",
        "ffa_lora",
        "rolora",
        "fellrec",
        "lora_sim",
        "centralised",
    ),
    group="fedecider.methods",
    is_config=lambda config: "ranking" in config,
    methods="fedecider.methods:METHODS",
    parse="fedecider.experiment.command_line:parse_settings_and",
    recorded="fedecider.experiment.command_line:recorded_settings",
    load="fedecider.experiment.federate:load",
    page="fedecider.experiment.run_page:report",
    choose="fedecider.experiment.auto:chosen_settings",
    conclusion="fedecider.experiment.run_page:conclusion_of",
    comparison="fedecider.experiment.llm_comparison:TABLE",
    tune="fedecider.experiment.federate:tunable",
    audit="fedecider.experiment.audit:audit_llm",
    contract="fedecider.testing.llm_contract:bench_of",
    deployment="fedecider.deployment.llm:PARTS",
)
