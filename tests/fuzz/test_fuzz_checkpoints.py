"""Checkpoints and projects: whatever lies in the folder, with checksums that fit, is refused or is what was saved."""

import json

import pytest
import torch
from fuzzing import PATHS, VALUES, damaged, fixed, told, with_other_value
from hypothesis import given
from hypothesis import strategies as st

from fedecider.cross_silo.command_line import parse_settings
from fedecider.deployment.project import read_project, site_names
from fedecider.federation.checksums import check_sums, write_sums
from fedecider.federation.state import RunState, load_state, save_state
from fedecider.models.new_items import read_new_items
from fedecider.running.manifest import MANIFEST_FILE, verify, write_manifest
from fedecider.running.plain import as_plain

TREE = {"x.lora_a": torch.arange(6.0).view(2, 3), "flags": torch.ones(3, dtype=torch.bool)}
FILES = ["state.json", "server.safetensors", "local.safetensors", "SHA256SUMS"]


@pytest.fixture
def saved(tmp_path):
    save_state(RunState(1, TREE, TREE, 1, 0.5, TREE, TREE), tmp_path, "abc")
    return tmp_path


def load(folder):
    return told(lambda: load_state(folder, "abc"))


def whole(state) -> bool:
    return state is None or all(tensor.nbytes < 1 << 20 for tree in state[1:3] for tensor in tree.values())


@given(st.sampled_from(FILES), st.data())
@fixed(83)
def test_damaged_files(saved, name, data):
    path = saved / "round_00001" / name
    content = path.read_bytes()
    try:
        path.write_bytes(data.draw(damaged(content)))
        if name != "SHA256SUMS":
            assert path.read_bytes() == content or load(saved) is None  # the checksum says so
            write_sums(saved / "round_00001")
        assert whole(load(saved))
    finally:
        path.write_bytes(content)
        write_sums(saved / "round_00001")


@given(st.data())
@fixed(83)
def test_other_numbers(saved, data):
    path = saved / "round_00001" / "state.json"
    content = path.read_text()
    try:
        path.write_text(json.dumps(data.draw(with_other_value(json.loads(content)))))
        write_sums(saved / "round_00001")
        state = load(saved)
        assert state is None or (0 <= state.best_round <= state.round == 1 and abs(state.best_score) < float("inf"))
    finally:
        path.write_text(content)
        write_sums(saved / "round_00001")


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "..", "x\0y"])
def test_sums_of_files_elsewhere_are_not_looked_at(saved, name):
    folder = saved / "round_00001"
    (saved / "x").write_text("not of this folder\n")
    sums = (folder / "SHA256SUMS").read_text()
    (folder / "SHA256SUMS").write_text(sums + f"{'0' * 64}  {name}\n")
    with pytest.raises(ValueError, match="expected every file that"):
        check_sums(folder)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    settings = as_plain(parse_settings([]).as_record())
    (folder / "project.json").write_text(
        json.dumps({"format": 1, "run": "abc", "clients": ["crime", "comics"], "settings": settings})
    )
    return folder


@given(st.data())
@fixed(13)
def test_projects(project, data):
    """Settings are many: every example parses all of them."""
    path = project / "project.json"
    content = path.read_text()
    try:
        path.write_text(json.dumps(data.draw(with_other_value(json.loads(content)))))
        write_sums(project)
        found = told(lambda: read_project(project))
        if found is not None:
            assert found.settings.run.data == str(project / "public")
            assert found.settings.run.cache == str(project / "cache")
            assert all(isinstance(name, str) for name in found.names)
    finally:
        path.write_text(content)


@given(st.lists(st.sampled_from(PATHS) | st.text(max_size=6), max_size=4))
@fixed(66)
def test_names_of_sites_stay_in_their_folder(names):
    """They are files (``parties/<site>.yaml``) and folders of kits."""
    for site in (told(lambda: site_names(names)) or {}).values():
        assert set(site) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
        assert len(site) <= 60


@given(st.data())
@fixed(50)
def test_checksums_of_a_hand_over(tmp_path, data):
    folder = tmp_path / "adapters" / "crime"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    write_manifest(tmp_path)
    path = tmp_path / MANIFEST_FILE
    content = json.loads(path.read_text())
    path.write_text(json.dumps(data.draw(with_other_value(content))))
    told(lambda: verify(tmp_path, [folder]))


@given(st.sampled_from([".jsonl", ".csv"]), st.data())
@fixed(66)
def test_files_of_new_items(tmp_path, ending, data):
    content = b'{"key": "b1", "title": "One", "text": "title: one"}\n' * 2
    path = tmp_path / f"new{ending}"
    path.write_bytes(data.draw(damaged(content if ending == ".jsonl" else b"key,title,text\nb1,One,one\nb2,Two,two\n")))
    told(lambda: read_new_items(path))
    path.write_text("\n".join(json.dumps(one) for one in data.draw(st.lists(VALUES, max_size=3))))
    told(lambda: read_new_items(path))
