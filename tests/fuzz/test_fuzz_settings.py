"""Settings, scenarios and party files: any content is refused with a sentence, or is what it says."""

import json

import pytest
import yaml
from fuzzing import PATHS, SCALARS, VALUES, damaged, fixed, told, with_other_value
from hypothesis import given
from hypothesis import strategies as st

from embedding_fr.commands import parse_embedding_settings
from embedding_fr.setup import EmbeddingRunConfig
from fedecider.bounds import LARGEST
from fedecider.deployment.messages import DeploymentConfig
from fedecider.federation.faults import LARGEST_FACTOR, MESSAGE_KINDS, UPLOAD_KINDS, Fault, read_faults
from fedecider.federation.privacy import PrivacyConfig
from fedecider.running.options import from_plain, load_yaml

NAMES = ["crime", "comics", "children"]
SCENARIO = {
    "faults": [{"client": "comics", "kind": "scale", "rounds": "2-4", "factor": 3.0}, {"client": 0, "kind": "away"}]
}
OPTIONS = [
    "num_rounds",
    "participation",
    "seed",
    "patience",
    "faults",
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


@given(with_other_value(SCENARIO))
@fixed(150)
def test_scenarios(content):
    for faults in told(lambda: read_faults(content, NAMES, "file")) or []:
        assert 0 <= faults.client < 3
        assert faults.kind in UPLOAD_KINDS
        assert abs(faults.factor) <= LARGEST_FACTOR
        assert not faults.holds(0)


@given(damaged(yaml.safe_dump(SCENARIO).encode()))
@fixed(100)
def test_files_of_scenarios(tmp_path, blob):
    path = tmp_path / "scenario.yaml"
    path.write_bytes(blob)
    content = told(lambda: load_yaml(path))
    told(lambda: read_faults(content, NAMES, "file"))


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
        assert 1 <= found.min_clients <= LARGEST[int]


@given(
    with_other_value({"clip": 1.0, "mechanism": "gaussian", "noise_scale": 0.5, "delta": 1e-5, "noise_on": "upload"})
)
@fixed(50)
def test_privacy_settings(values):
    found = told(lambda: from_plain(PrivacyConfig, values, "privacy"))
    if found is not None:
        assert found.noise_scale >= 0.0


@given(st.sampled_from(OPTIONS), SCALARS)
@fixed(25)
def test_values_on_the_command_line(name, value):
    word = (
        json.dumps(value) if value is None or isinstance(value, bool) else str(value) if value != 10**400 else "9" * 400
    )
    found = told(lambda: parse_embedding_settings("", ["--method", "fedmf", f"--{name}={word}"], "fedmf"))
    if found is not None:
        assert 1 <= found.run.num_rounds <= LARGEST[int]
        assert 0.0 < found.run.participation <= 1.0


@pytest.mark.parametrize("path", PATHS)
def test_outputs_that_are_no_folders_are_refused_or_kept(path, tmp_path, monkeypatch):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    told(lambda: parse_embedding_settings("", ["--method", "fedmf", f"--output={path}"], "fedmf"))
    assert list(tmp_path.rglob("*")) == [here]


def test_kinds_of_messages_are_told_where_there_are_none():
    content = {"faults": [{"client": 1, "kind": "oversized"}]}
    with pytest.raises(ValueError, match="it damages messages, which a deployment alone has"):
        read_faults(content, NAMES, "file")
    assert read_faults(content, NAMES, "file", (*UPLOAD_KINDS, *MESSAGE_KINDS)) == [Fault(1, "oversized")]


@pytest.mark.parametrize(
    ("one", "message"),
    [
        ({"client": True, "kind": "away"}, "got client 'True'"),
        ({"client": 3, "kind": "away"}, "a number from 0 to 2"),
        ({"client": -1, "kind": "away"}, "a number from 0 to 2"),
        ({"client": "1", "kind": "away"}, "got client '1'"),
        ({"client": [0], "kind": "away"}, "got client"),
        ({"client": 1, "kind": ["away"]}, "got kind"),
        ({"client": 1, "kind": "scale", "factor": True}, "got factor 'True'"),
        ({"client": 1, "kind": "scale", "factor": 1e31}, "expected a number of at most"),
        ({"client": 1, "kind": "away", "rounds": "3٣"}, "got rounds"),
        ({"client": 1, "kind": "away", "rounds": "9" * 30}, "got rounds"),
        ({"client": 1, "kind": "away", "rounds": "34"}, ""),
    ],
)
def test_scenarios_that_were_read_as_something_else(one, message):
    if message:
        with pytest.raises(ValueError, match=message):
            read_faults({"faults": [one]}, NAMES, "file")
    else:
        assert read_faults({"faults": [one]}, NAMES, "file") == [Fault(1, "away", 34, 34)]


@pytest.mark.parametrize("word", ["--num_rounds", "--participation", "--seed"])
def test_numbers_that_no_float_can_hold(word):
    with pytest.raises(ValueError, match=f"{word[2:]}|too large"):
        parse_embedding_settings("", ["--method", "fedmf", word, "9" * 400], "fedmf")


def test_faults_without_federation_are_refused():
    with pytest.raises(ValueError, match="nothing leaves a client"):
        EmbeddingRunConfig(federation=False, faults="scenario.yaml")
