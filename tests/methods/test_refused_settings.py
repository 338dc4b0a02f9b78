"""Settings of training and of methods: what is refused is named, and the first trial of a search is the default."""

import pytest

from fedecider.methods import METHODS
from fedecider.methods.config import LocalTraining

NAN, INFINITE = float("nan"), float("inf")
WRONG = {
    "fedecider": {
        "alpha_init": ("own", INFINITE),
        "alpha_learning_rate": (0.0,),
        "ablation": ("all",),
    },
    "fedavg": {"weighting": ("mean",)},
    "ditto": {"personal_pull": (-1.0, INFINITE), "weighting": ("mean",)},
    "fedprox": {"mu": (-0.1, NAN), "weighting": ("mean",)},
    "fdlora": {
        "sync_every": (0,),
        "num_search_prompts": (0,),
        "num_evaluations": (2,),
        "outer_learning_rate": (0.0,),
        "outer_momentum": (1.0,),
        "l1_weight": (-0.1,),
        "weighting": ("mean",),
    },
    "fellrec": {"a": (-0.1, NAN), "beta": (0.0,), "temperature": (-1.0,), "exponent": ("t",)},
    "lora_sim": {"similarity": ("cosine",), "temperature": (0.0,)},
}
TRAINING = {"local_epochs": (0,), "batch_size": (0,), "learning_rate": (0.0,), "precision": ("fp16",)}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_settings_of_methods_are_named(name):
    for setting, values in WRONG[name].items():
        for value in values:
            with pytest.raises(ValueError, match=setting):
                METHODS[name].config(**{setting: value})


def test_wrong_settings_of_training_are_named():
    for setting, (value,) in TRAINING.items():
        with pytest.raises(ValueError, match=setting):
            LocalTraining(**{setting: value})
