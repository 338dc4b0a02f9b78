"""What is wrong with the settings of a method, or with what it says of them to a search."""

from dataclasses import dataclass, field, make_dataclass

from fedecider.search_space import OneOf, Real, Whole


def named(name):
    told = {"__doc__": f"Settings.\n\nArgs:\n    {name}: What it is.\n"}
    return make_dataclass("Clashing", [(name, float, field(default=0.0))], frozen=True, namespace=told)


def spaces():
    """What is wrong -> name, range, pattern of the sentence, for the example of the cross-silo track."""
    return {
        "unknown name": ("shares", Real(0.1, 0.9), "the space has 'shares', which is no setting"),
        "unknown field": ("share.x", Real(0.1, 0.9), r"the space has 'share\.x', which is no setting"),
        "a pair": ("share", (0.1, 0.9), r"the space has \(0\.1, 0\.9\) for share, expected Real, Whole or OneOf"),
        "upper end": (
            "share",
            Real(0.1, 1.5),
            r"may draw share 1\.5, which the settings refuse: .*1",
        ),
        "lower end": ("share", Real(-0.1, 1.0), r"may draw share -0\.1, which the settings refuse"),
        "last value": ("share", OneOf((0.1, 0.2, 2.0)), r"may draw share 2\.0, which the settings refuse"),
        "text": ("share", OneOf((0.1, "much")), "may draw share 'much', which the settings refuse"),
        "real epochs": ("local_epochs", Real(1, 5), r"may draw local_epochs .*, which the settings refuse"),
        "whole end": ("local_epochs", Whole(0, 5), r"may draw local_epochs 0, which the settings refuse"),
        "half ends": ("local_epochs", Whole(1.5, 5), "expected whole numbers as ends"),
        "no end": ("share", Real(0.0, float("inf")), "expected two finite ends, the smaller one first"),
        "exchanged": ("share", Real(0.9, 0.1), "expected two finite ends, the smaller one first"),
        "log of 0": ("share", Real(0.0, 0.9, log=True), "expected ends above 0"),
        "four digits": ("share", Real(0.12345, 0.9), "expected ends of at most three digits"),
        "multiple of a later setting": (
            "share",
            Real(0.1, 0.9, of="local_epochs"),
            "expected of a setting before it",
        ),
        "no values": ("share", OneOf(()), "expected one value at least"),
    }


def wrong_settings(llm, embedding):
    """(part of the contract, what is wrong) -> entry, pattern of the sentence; of a sound entry of each track."""
    texts = {"__doc__": "Settings."}
    mutable = dataclass(type("Mutable", (), {"__annotations__": {}, **texts}))
    silent = make_dataclass("Silent", [("share", float, field(default=0.5))], frozen=True, namespace=texts)
    told = {"__doc__": "Settings.\n\nArgs:\n    seed: The seed.\n"}
    clashing = make_dataclass("Clashing", [("seed", int, field(default=0))], frozen=True, namespace=told)
    return {
        ("settings", "mutable"): (llm._replace(config=mutable), "Mutable is no frozen dataclass"),
        ("settings", "no text"): (llm._replace(config=silent), r"Silent has no help text for \['share'\]"),
        ("settings", "clash"): (embedding._replace(config=clashing), r"\['seed'\] of Clashing are names of common"),
        ("settings", "grid"): (
            llm._replace(grid=({"shares": 1.0},)),
            r"the grid has \['shares'\], which are no settings",
        ),
        ("settings", "grid value"): (
            llm._replace(grid=({"share": 2.0},)),
            r"the grid has \{'share': 2\.0\}, which the settings refuse: .*1",
        ),
        **{
            ("settings", f"clash {name}"): (entry._replace(config=named(name)), rf"\['{name}'\] of Clashing are names")
            for name, entry in {"clip": embedding, "config": llm, "lora_rank": llm}.items()
        },
        ("settings", "clash of the cross-silo track"): (
            llm._replace(config=named("num_rounds")),
            r"\['num_rounds'\] of Clashing are",
        ),
        **{
            ("space", what): (llm._replace(space={name: one}), pattern)
            for what, (name, one, pattern) in spaces().items()
        },
    }
