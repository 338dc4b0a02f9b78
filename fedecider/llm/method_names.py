"""Names of the methods of this track, for commands that must know them before anything heavy is imported."""

METHOD_NAMES = (
    "fedecider",
    "local",
    "fedavg",
    "ditto",
    "fdlora",
    "fedprox",
    "pfedavg",
    "ffa_lora",
    "rolora",
    "fellrec",
    "lora_sim",
    "centralised",
)
"""As in ``fedecider.methods.METHODS``; a test compares the two."""
