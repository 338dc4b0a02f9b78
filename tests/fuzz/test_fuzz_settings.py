"""Settings and party files: any content is refused with a sentence, or is what it says."""

import json

import pytest
import yaml
from fuzzing import PATHS, SCALARS, VALUES, fixed, told, with_other_value
from hypothesis import given
from hypothesis import strategies as st

from embedding_fr.commands import parse_settings
from fedecider.bounds import LARGEST
from fedecider.deployment.messages import DeploymentConfig
from fedecider.federation.config import DevicePrivacyConfig
from fedecider.running.options import from_plain
from fedecider.running.settings_files import load_yaml

OPTIONS = [
    "num_rounds",
    "participation",
    "seed",
    "patience",
    "robust_mean",
    "resume",
    "learning_rate",
    "clip",
]


def as_yaml(value) -> bytes:
    """``value`` as YAML as far as it can be written."""
    try:
        return yaml.safe_dump(value, allow_unicode=True).encode()
    except (UnicodeEncodeError, yaml.YAMLError):
        return b"{"


@given(VALUES)
@fixed(80)
def test_files_of_any_content(tmp_path, value):
    path = tmp_path / "any.yaml"
    path.write_bytes(as_yaml(value))
    told(lambda: load_yaml(path))


@given(
    st.dictionaries(st.sampled_from(["deadline_s", "min_clients", "max_megabytes", "x", "../x"]), VALUES, max_size=3)
)
@fixed(50)
def test_blocks_of_settings(values):
    found = told(lambda: from_plain(DeploymentConfig, values, "party.yaml"))
    if found is not None:
        assert 0 <= found.deadline_s < float("inf")
        assert 1 <= found.min_clients <= LARGEST


@given(
    with_other_value({"clip": 1.0, "mechanism": "gaussian", "noise_scale": 0.5, "delta": 1e-5, "noise_on": "upload"})
)
@fixed(50)
def test_privacy_settings(values):
    found = told(lambda: from_plain(DevicePrivacyConfig, values, "privacy"))
    if found is not None:
        assert found.noise_scale >= 0.0


@given(st.sampled_from(OPTIONS), SCALARS)
@fixed(25)
def test_values_on_the_command_line(name, value):
    word = (
        json.dumps(value) if value is None or isinstance(value, bool) else str(value) if value != 10**400 else "9" * 400
    )
    found = told(lambda: parse_settings(["--method", "fedmf", f"--{name}={word}"]))
    if found is not None:
        assert 1 <= found.run.num_rounds <= LARGEST
        assert 0.0 < found.run.participation <= 1.0


@pytest.mark.parametrize("path", PATHS)
def test_outputs_that_are_no_folders_are_refused_or_kept(path, tmp_path, monkeypatch):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    told(lambda: parse_settings(["--method", "fedmf", f"--output={path}"]))
    assert list(tmp_path.rglob("*")) == [here]


@pytest.mark.parametrize("word", ["--num_rounds", "--participation", "--seed"])
def test_numbers_that_no_float_can_hold(word):
    with pytest.raises(ValueError, match=f"{word[2:]}|too large"):
        parse_settings(["--method", "fedmf", word, "9" * 400])
