"""The wheel, installed somewhere else and used from another folder."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = ("fedecider", "idgen", "distill", "embedding_fr")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy of what git would ship, so that nothing is written into the repository."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in (*PACKAGES, "pyproject.toml", "README.md", "LICENSE"):
        path = REPOSITORY / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source / name)
    words = ["--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", str(built), str(source)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *words], check=True, capture_output=True)
    (found,) = built.glob("fedecider-*.whl")
    return found


def test_the_wheel_holds_packages_settings_and_types_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} - set(PACKAGES) == {f"{wheel.name.split('-py3')[0]}.dist-info"}
    assert {"fedecider/py.typed", "fedecider/configs/demo_causal.yaml"} <= set(names)
    shipped = {name for name in names if name.startswith("fedecider/configs/")}
    own = {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "fedecider" / "configs").rglob("*.*")}
    assert shipped == own
    page = {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "fedecider" / "serve" / "static").iterdir()}
    assert page <= set(names)
    assert not [name for name in names if name.endswith((".pyc", ".parquet"))]


def test_the_wheel_runs_from_another_folder(wheel, tmp_path):
    place, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    words = ["--no-deps", "--quiet", "--target", str(place), str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "install", *words], check=True, capture_output=True)

    def ran(*command):
        done = subprocess.run(
            command,
            cwd=elsewhere,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": str(place)},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = ran(sys.executable, "-c", "import fedecider, idgen, distill; print(fedecider.__file__, distill.__file__)")
    assert where.split() == [str(place / name / "__init__.py") for name in ("fedecider", "distill")]
    command = str(place / "bin" / "fedecider")
    assert "recommend" in ran(sys.executable, command, "--help")
    printed = ran(sys.executable, command, "federate", "--config", "configs/amazon_small_pool.yaml", "--print_config")
    assert "domains: movies_tv,cds_vinyl,video_games" in printed
    assert not list(elsewhere.iterdir())
