"""The wheel and the source archive: what is in them, and the wheel used from another folder."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

import pytest

pytestmark = pytest.mark.whole

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = ("fedecider", "idgen", "distill", "embedding_fr")
FOLDERS = (*PACKAGES, "configs")
"""What a checkout has; the wheel has ``configs`` as fedecider/configs."""
BESIDE = {
    "CHANGELOG.md",
    "CITATION.cff",
    "LICENSE",
    "MANIFEST.in",
    "README.md",
    "constraints.txt",
    "pyproject.toml",
    "setup.py",
}
"""Files of the root that the source archive holds."""
WRITTEN = {"PKG-INFO", "setup.cfg", "fedecider.egg-info"}
"""What setuptools adds to it."""
LITTER = (
    "data/shop/crime/events.parquet",
    "runs/first/private/crime.pt",
    "runs/first/metrics.json",
    ".cache/pretrain-0/model.safetensors",
    ".venv/lib/python3.11/site-packages/numpy/__init__.py",
    "build/old.txt",
    "dist/fedecider-0.0.1.tar.gz",
    "site/index.html",
    "tests/test_package.py",
    "fedecider/__pycache__/bounds.cpython-311.pyc",
    "idgen/.mypy_cache/3.11/x.json",
)
"""What lies in a folder that somebody works in, and belongs into no archive."""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of what git would ship, with litter in it, so that nothing is written into the repository."""
    copy = tmp_path_factory.mktemp("source")
    for name in (*FOLDERS, *BESIDE):
        path = REPOSITORY / name
        if path.is_dir():
            shutil.copytree(path, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, copy / name)
    for name in LITTER:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(b"litter")
    return copy


def build_wheel(source: Path, folder: Path) -> Path:
    words = ["--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", str(folder), str(source)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *words], check=True, capture_output=True)
    (found,) = folder.glob("fedecider-*.whl")
    return found


@pytest.fixture(scope="module")
def archive(source, tmp_path_factory):
    """The source archive, by the hook that ``python -m build`` calls."""
    folder = tmp_path_factory.mktemp("sdist")
    program = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", program], cwd=source, check=True, capture_output=True)
    (found,) = folder.glob("fedecider-*.tar.gz")
    return found


@pytest.fixture(scope="module")
def wheel(source, archive, tmp_path_factory):
    """After the archive, since setuptools reads the list of files that the wheel leaves behind."""
    return build_wheel(source, tmp_path_factory.mktemp("wheel"))


def test_the_wheel_holds_packages_settings_and_types_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} - set(PACKAGES) == {f"{wheel.name.split('-py3')[0]}.dist-info"}
    assert {"fedecider/py.typed", "fedecider/configs/demo_causal.yaml"} <= set(names)
    shipped = {name for name in names if name.startswith("fedecider/configs/")}
    own = {f"fedecider/{path.relative_to(REPOSITORY)}" for path in (REPOSITORY / "configs").rglob("*.*")}
    assert shipped == own
    modules = {str(path.relative_to(REPOSITORY)) for name in PACKAGES for path in (REPOSITORY / name).rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == modules
    page = {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "fedecider" / "serve" / "static").iterdir()}
    assert page <= set(names)
    assert not [name for name in names if name.endswith((".pyc", ".parquet"))]


def in_archive(archive: Path) -> dict[str, bytes]:
    """Path below the archive's one folder -> content."""
    top = archive.name.removesuffix(".tar.gz")
    with tarfile.open(archive) as packed:
        files = {one.name: packed.extractfile(one).read() for one in packed.getmembers() if one.isfile()}
    assert {name.split("/")[0] for name in files} == {top}
    return {name.removeprefix(f"{top}/"): content for name, content in files.items()}


def test_the_archive_holds_what_the_wheel_is_built_from_and_nothing_else(source, archive):
    names = set(in_archive(archive))
    own = {
        str(path.relative_to(REPOSITORY))
        for package in FOLDERS
        for path in (REPOSITORY / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if PurePosixPath(name).parts[0] in FOLDERS} == own
    assert {PurePosixPath(name).parts[0] for name in names} - set(FOLDERS) == BESIDE | WRITTEN
    assert all((source / name).is_file() for name in LITTER)
    assert not names & set(LITTER)


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Programs of a fresh environment with the wheel; other packages are those of this one, without the repository."""
    place = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True, capture_output=True)
    python = place / "bin" / "python"
    words = ["--no-deps", "--quiet", "--ignore-installed", str(wheel)]
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", *words]
    subprocess.run(command, check=True, capture_output=True)
    own = Path(sysconfig.get_path("purelib", vars={"base": str(place), "platbase": str(place)}))
    (own / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")  # its .pth files are not read again
    return place / "bin"


def ran(program: Path, *words: str, folder: Path) -> str:
    keep = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "FEDECIDER_DATA")}
    done = subprocess.run(
        [str(program), *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**keep, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_runs_from_another_folder(installed, tmp_path):
    program = "import fedecider, idgen, distill, embedding_fr, sys; print(fedecider.__file__); print(sys.path)"
    where, paths = ran(installed / "python", "-c", program, folder=tmp_path).splitlines()
    assert where.startswith(str(installed.parent))
    assert f"'{REPOSITORY}'" not in paths
    command = installed / "fedecider"
    assert "recommend" in ran(command, "--help", folder=tmp_path)
    printed = ran(command, "federate", "--config", "configs/companies.yaml", "--print_config", folder=tmp_path)
    assert "num_rounds: 20" in printed
    assert "--domains" in ran(command, "federate", "--help", folder=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_demo_runs_from_the_wheel_in_an_empty_folder(installed, tmp_path):
    words = ("--num_rounds", "1", "--output", "run")
    ran(installed / "fedecider", "federate", "--domains", "crime,comics,children", *words, folder=tmp_path)
    assert (tmp_path / "run" / "report.html").is_file()
    content = json.loads((tmp_path / "run" / "run.json").read_text())
    assert content["config"]["run"]["pretrain"]["text_encoder"] == "tfidf"  # of configs/demo_causal.yaml
