"""Settings that a method refuses: each is named. Bounds of single settings are those of `fedecider.bounds`."""

import math

import pytest
from toy_federation import NUM_ITEMS, toy_method

REFUSED = [
    ("fedmf", {"weighting": "equal"}, "weighting"),
    ("colr", {"rank": 5}, "embedding_size 4"),
    ("fedca", {"num_components": 5}, "embedding_size 4"),
    ("fedca", {"own_share": 1.2}, r"own_share 1\.2"),
    ("fedcia", {"num_vectors": 0}, "num_vectors 0"),
    ("feddae", {"dropout": 1.0}, r"dropout 1\.0"),
    ("fedfast", {"follow_decay": math.nan}, "follow_decay nan"),
    ("cofedrec", {"temperature": 0.0}, r"temperature 0\.0"),
    ("perfedrec", {"num_layers": -1}, "num_layers -1"),
    ("pfedclr", {"rank": 0}, "rank 0"),
    ("pfedrec", {"variant": "text"}, "variant"),
    ("gpfedrec", {"threshold": math.nan}, "threshold nan"),
    ("gpfedrec", {"hidden_sizes": "0"}, "layer sizes '0'"),
    ("fedncf", {"hidden_sizes": "16,none"}, "layer sizes '16,none'"),
    ("fedrecgel", {"hidden_sizes": "32,x"}, "layer sizes '32,x'"),
    ("fedrecgel", {"private_radius": -0.1}, r"private_radius -0\.1"),
    ("fedem", {"adapter_layers": "8,x"}, "layer sizes '8,x'"),
    ("fedem", {"variant": "code", "merging": "DM"}, "merging DM"),
    ("fedem", {"variant": "code", "aggregation": "mean"}, "aggregation mean"),
    ("fedmf_em", {"scheme": "SR"}, "scheme"),
    ("pfedgraph", {"same_above": 1.5}, r"same_above 1\.5"),
    *(
        (name, {**changes, "direction": 0.0} if name == "fednear" else changes, said)
        for name in ("fedease", "fednear")
        for changes, said in (
            ({"noise_scale": 1.0}, "expected clip"),
            ({"noise_scale": -1.0, "clip": 1.0}, r"noise_scale -1\.0"),
            ({"delta": 1.0}, r"delta 1\.0"),
            ({"top_k": NUM_ITEMS}, f"top_k {NUM_ITEMS}"),
        )
    ),
    ("fednear", {"noise_scale": 1.0, "clip": 1.0}, "direction 0"),
]


@pytest.mark.parametrize(("name", "settings", "said"), REFUSED, ids=str)
def test_settings_that_cannot_be_are_refused(name, settings, said):
    with pytest.raises(ValueError, match=said):
        toy_method(name, **settings)
