"""Memory that is there: of the machine and its control groups; and what a run says before it starts."""

from types import SimpleNamespace

import pytest

from fedecider.running import machine as memory

GB = 10**9


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """A machine with 20 GB left; ``put`` writes files of control groups, ``lie_in`` says where the process lies."""
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=20 * GB))
    monkeypatch.setattr(memory, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "OF_PROCESS", tmp_path / "self")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)

    def put(folder, **files):
        place = tmp_path / "cgroup" / folder
        place.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (place / name.replace("__", ".")).write_text(f"{text}\n")

    return SimpleNamespace(put=put, lie_in=lambda *lines: (tmp_path / "self").write_text("\n".join(lines) + "\n"))


def test_without_control_groups_it_is_the_machine_s(groups):
    assert memory.available_bytes() == 20 * GB
    groups.lie_in("0::/somewhere/else", "3:cpu:/x")
    assert memory.available_bytes() == 20 * GB


def test_the_tightest_group_around_the_process_counts(groups):
    groups.lie_in("0::/slice/box")
    groups.put("slice/box", memory__max="max", memory__current=3 * GB, memory__stat="inactive_file 0")
    assert memory.available_bytes() == 20 * GB
    stat = f"anon 1\ninactive_file {GB}"
    groups.put("slice", memory__max=8 * GB, memory__current=5 * GB, memory__stat=stat)
    assert memory.available_bytes() == 4 * GB  # the page cache can go
    groups.put("slice/box", memory__max=2 * GB, memory__current=3 * GB)
    assert memory.available_bytes() == 0
    groups.put("slice/other", memory__max=1, memory__current=0, memory__stat="inactive_file 0")
    groups.lie_in("0::/slice")
    assert memory.available_bytes() == 4 * GB


def test_groups_of_the_first_version(groups):
    groups.lie_in("5:cpu,cpuacct:/box", "4:memory:/box", "0::/box")
    files = {"memory__usage_in_bytes": 2 * GB, "memory__stat": f"inactive_file 7\ntotal_inactive_file {GB}"}
    groups.put("memory/box", memory__limit_in_bytes=6 * GB, **files)
    groups.put("cpu/box", memory__limit_in_bytes=1, **files)
    assert memory.available_bytes() == 5 * GB


def test_what_fits_is_said_from_a_gigabyte_on_and_what_does_not_is_an_error(groups, monkeypatch):
    said = []
    memory.check_memory(GB - 1, "a small sum", lambda: "", said.append)
    assert said == []
    memory.check_memory(3 * GB, "a sum", lambda: "", said.append)
    assert said == ["a sum takes 3.0 GB of the 20.0 GB of memory that are available"]
    message = "got a sum, which takes 21.0 GB, expected at most the 20.0 GB of memory that are available: take less"
    with pytest.raises(ValueError, match=f"^{message}$"):
        memory.check_memory(21 * GB, "a sum", lambda: "take less", said.append)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert memory.has_room(5 * GB)
    with pytest.raises(ValueError, match=r"takes 5\.1 GB in each of 4 processes, expected at most the 20\.0 GB"):
        memory.check_memory(51 * GB // 10, "a sum", lambda: "", said.append)
