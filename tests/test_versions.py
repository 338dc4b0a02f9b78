"""A kill while a version is made, put in force or forgotten leaves the old one or the new one, whole."""

import json
import os
import shutil
import sys

import pytest

from fedecider.models.versions import add_version, changing, go_back, in_force, read_versions
from fedecider.running.manifest import Manifest, note_changed, put_manifest, verify, write_manifest
from fedecider.running.run_folder import RunFolder

WRITES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"}
OLD, NEW = "counts of anna and bob", "counts of bob"


class Killed(BaseException):
    """Nothing is written from here on, by whatever cleans up either."""


class Kill:
    """From the n-th write below a folder on nothing is written any more."""

    def __init__(self):
        self.folder, self.left = "", 0
        sys.addaudithook(self.hook)

    def hook(self, event, args):
        if not self.folder or not (event in WRITES or (event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR))):
            return
        path = str(args[0])
        if path.startswith(self.folder) and not path.endswith(".lock"):
            self.left -= 1
            if self.left < 0:
                raise Killed(event, path)


KILL = Kill()


def killed_after(num, folder, work):
    """Whether ``work`` was killed at the write after so many."""
    KILL.folder, KILL.left = str(folder), num
    try:
        work()
    except Killed:
        return True
    finally:
        KILL.folder = ""
    return False


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    files = {"run.json": "{}", "private/shop/counts": OLD, "private/other/counts": "theirs", "report.html": OLD}
    for name, text in {**files, "per_user.parquet": OLD}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    write_manifest(folder)
    return folder


def change(text):
    def put(folder: RunFolder):
        shutil.rmtree(folder.private / "shop")
        (folder.private / "shop").mkdir()
        (folder.private / "shop" / "counts").write_text(text)
        if text == NEW:
            folder.per_user.write_text(text)
            (folder.root / "report.html").unlink()
        note_changed(folder.root, [folder.private / "shop", folder.per_user, folder.root / "report.html"])

    return put


def add(run, text, alone=False):
    with changing(run):
        return add_version(run, in_force(run), "a change", change(text), alone)


def counts(run):
    return (in_force(run) / "private" / "shop" / "counts").read_text()


def everything(run):
    return {
        path.relative_to(run): path.read_text() for path in run.rglob("*") if path.is_file() and path.name != ".lock"
    }


def all_kills(run, tmp_path, work):
    """The folder after a kill at each of the writes of ``work``, in turn; it stands at the same place."""
    kept, num = shutil.copytree(run, tmp_path / "kept"), 0
    while killed_after(num, run, lambda: work(run)):
        yield num
        shutil.rmtree(run)
        shutil.copytree(kept, run)
        num += 1
    assert num > 8, "as many writes as there are files"


def test_a_kill_in_an_update_leaves_the_old_or_the_new(run, tmp_path):
    seen = set()
    for _ in all_kills(run, tmp_path, lambda run: add(run, NEW)):
        seen.add(counts(run))
        assert (run / "private" / "shop" / "counts").read_text() == OLD
        was_new = counts(run) == NEW
        number = add(run, "after", alone=True)
        assert counts(run) == "after"
        assert read_versions(run).known[number].made_from == (2 if was_new else 1)
        assert sorted(path.name for path in (run / "versions").iterdir()) == [str(number)]
    assert seen == {OLD}, "nothing is written after the one write that puts it in force"
    assert counts(run) == NEW


def test_a_kill_in_forgetting_leaves_the_old_or_the_new(run, tmp_path):
    add(run, OLD + " again")
    old = everything(run)
    seen = set()
    for _ in all_kills(run, tmp_path, lambda run: add(run, NEW, alone=True)):
        seen.add(counts(run))
        if counts(run) == NEW:
            with pytest.raises(ValueError, match="forgotten"):
                go_back(run, 2)
            with changing(run):  # whatever changes the run next
                pass
            assert not [text for text in everything(run).values() if "anna" in text]
        else:
            assert {path: text for path, text in everything(run).items() if path in old} == old
            go_back(run, 1)
            assert counts(run) == OLD
    assert seen == {OLD + " again", NEW}
    assert (run / "versions" / "3" / "private" / "other" / "counts").read_text() == "theirs"
    assert (run / "per_user.parquet").read_text() == NEW, "that of who stays"
    verify(run, [run / "per_user.parquet", run / "private"])
    assert not [text for text in everything(run).values() if "anna" in text]


def test_a_kill_in_going_back_leaves_one_of_both(run, tmp_path):
    add(run, NEW)
    kept, num = shutil.copytree(run, tmp_path / "kept"), 0
    while killed_after(num, run, lambda: go_back(run, 1)):
        assert counts(run) == NEW
        shutil.rmtree(run)
        shutil.copytree(kept, run)
        num += 1
    assert num == 2, "written aside, and renamed"
    assert counts(run) == OLD


def test_companies_may_be_called_as_folders_of_a_run(run):
    """Their folders are copied; the run's own of that name are not."""
    names = ("private/versions", "private/checkpoints", "adapters/versions", "adapters/checkpoints")
    for name in (*names, "checkpoints", "backbone/.scratch-1-2-3-x"):
        (run / name).mkdir(parents=True)
        (run / name / "file").write_text(name)
    add(run, NEW)
    copy = run / "versions" / "2"
    assert [(copy / name / "file").read_text() for name in names] == [*names]
    assert not (copy / "checkpoints").exists()
    assert not list((copy / "backbone").iterdir())


def test_what_cannot_be_removed_is_told(run, monkeypatch):
    def busy(path, **options):
        if not options:  # of remove_unusable alone
            raise PermissionError(13, "in use", str(path))

    add(run, OLD)
    monkeypatch.setattr("fedecider.models.versions.shutil.rmtree", busy)
    with pytest.raises(ValueError, match=r"versions/\.scratch-.*-2"):
        add_version(run, in_force(run), "a change", lambda folder: None, forgets=True)
    monkeypatch.undo()
    with changing(run):
        pass
    assert not (run / "versions" / "2").exists()


def test_who_changes_a_run_is_alone(run):
    with changing(run), pytest.raises(ValueError, match="another process"):
        add(run, NEW)


def test_a_record_that_is_damaged_is_told(run):
    add(run, NEW)
    manifest = json.loads((run / "manifest.json").read_text())
    for number in (1, 7, "2"):
        (run / "manifest.json").write_text(json.dumps({**manifest, "in_force": number}))
        with pytest.raises(ValueError, match=r"manifest\.json"):
            in_force(run)
    put_manifest(run, Manifest(manifest["files"], [], 7, (2,)))
    with pytest.raises(ValueError, match="versions/7 is missing"):
        in_force(run)


def test_a_version_that_is_not_in_force_is_missed_too(run):
    add(run, NEW)
    add(run, "after")
    shutil.rmtree(run / "versions" / "2")
    with pytest.raises(ValueError, match="versions/2 is missing"):
        read_versions(run)


def test_versions_are_never_lost_with_the_file_that_says_which_is_in_force(run):
    add(run, NEW)
    (run / "manifest.json").rename(run / "kept")
    for work in (in_force, lambda run: add(run, "after"), lambda run: go_back(run, 1), write_manifest):
        with pytest.raises(ValueError, match=r"without manifest\.json"):
            work(run)
    assert (run / "versions" / "2" / "private" / "shop" / "counts").read_text() == NEW
    (run / "kept").rename(run / "manifest.json")
    shutil.rmtree(run / "versions")  # nor is the run as it was trained taken for one that was never updated
    for work in (in_force, lambda run: add(run, "after"), lambda run: go_back(run, 1)):
        with pytest.raises(ValueError, match="versions/2 is missing"):
            work(run)
