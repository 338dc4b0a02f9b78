"""Names of the methods of this track, for commands that must know them before anything heavy is imported."""

METHOD_NAMES = (
    "fedease",
    "fednear",
    "fedmf",
    "pfedclr",
    "fedrap",
    "fedncf",
    "pfedrec",
    "gpfedrec",
    "fedem",
    "fedrecgel",
    "fedmf_em",
    "fedncf_em",
    "pfedrec_em",
    "gpfedrec_em",
    "fedrap_em",
)
"""As in ``embedding_fr.methods.METHODS``; a test compares the two."""
