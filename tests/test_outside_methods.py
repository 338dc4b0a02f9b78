"""Methods that installed packages bring: found, listed, and told apart from what is out of order."""

import json

import pytest
from outside import look_again, use, write_package

from embedding_fr.methods import METHODS as EMBEDDING
from fedecider.cli import doctor
from fedecider.cli.main import main
from fedecider.cross_silo.command_line import parse_settings
from fedecider.engine.track import track_of
from fedecider.methods import BUILT_IN
from fedecider.methods import METHODS as LLM
from fedecider.running.settings_files import CONFIGS

pytestmark = pytest.mark.whole

GOOD_LLM = "from fedecider.methods import METHODS\nMETHOD = METHODS['fedavg']\n"
GOOD_EMBEDDING = "from embedding_fr.methods import METHODS\nMETHOD = METHODS['fedmf']\n"
BROKEN = {
    "absent_module": ("", "nosuchmodule:METHOD", r"cannot be imported \(ModuleNotFoundError: .*nosuchmodule"),
    "raises": ("1 / 0", "raises:METHOD", r"cannot be imported \(ZeroDivisionError: division by zero\)"),
    "ends": ("raise SystemExit(3)", "ends:METHOD", r"cannot be imported \(SystemExit: 3\)"),
    "absent_name": ("", "absent_name:METHOD", r"cannot be imported \(AttributeError"),
    "function": (
        "def METHOD(): ...",
        "function:METHOD",
        r"is of the type builtins\.function, expected a fedecider\.meth",
    ),
    "other_track": (
        GOOD_EMBEDDING,
        "other_track:METHOD",
        r"is of the type embedding_fr\.methods\.entry\.Method, expected a fedec",
    ),
    "no_config": (
        f"{GOOD_LLM}METHOD = METHOD._replace(config=dict)",
        "no_config:METHOD",
        "has no dataclass of settings",
    ),
    "Bad-Name": (GOOD_LLM, "Bad_Name:METHOD", "got the method 'Bad-Name' of bad-name 1.0, expected a name of small"),
}
"""Name of a package and its method -> module, entry point, what is told."""


@pytest.fixture
def site(tmp_path, monkeypatch):
    yield tmp_path / "site"
    monkeypatch.undo()
    look_again(tmp_path)


def test_without_packages_there_are_the_built_in_methods():
    assert list(LLM)[: len(BUILT_IN)] == list(BUILT_IN)
    assert LLM.package("fedavg") is None
    assert LLM.as_record("fedavg") == {}
    assert LLM.problem("fedavg") == ""
    with pytest.raises(KeyError):
        LLM["nothing"]
    assert LLM.get("nothing") is None


def test_packages_are_looked_through_once_and_modules_imported_when_they_are_asked_for(site, monkeypatch, tmp_path):
    count = f"open({str(tmp_path / 'imported')!r}, 'a').write('x')\n"
    write_package(site, "acme-fl", count + GOOD_LLM, llm={"acme": "acme_fl:METHOD"})
    use(monkeypatch, site)
    assert list(LLM) == [*BUILT_IN, "acme"]
    assert len(LLM) == len(BUILT_IN) + 1
    assert "acme" in LLM
    assert not (tmp_path / "imported").exists()
    assert LLM["acme"] == LLM["fedavg"] == LLM["acme"]
    assert (tmp_path / "imported").read_text() == "x"
    assert LLM.as_record("acme") == {"package": {"name": "acme-fl", "version": "1.0"}}
    write_package(site, "late", GOOD_LLM, llm={"late": "late:METHOD"})
    assert "late" not in LLM


@pytest.mark.parametrize("name", BROKEN)
def test_a_package_that_is_out_of_order_is_told_when_its_method_is_asked_for(name, site, monkeypatch, capsys):
    module, point, message = BROKEN[name]
    write_package(site, name.lower(), llm={name: point})
    if module:
        (site / f"{point.partition(':')[0]}.py").write_text(module)
    use(monkeypatch, site)
    with pytest.raises(ValueError, match=message) as told:
        LLM[name]
    assert len(str(told.value).splitlines()) == 1
    assert LLM.problem(name) == str(told.value)
    assert main(["federate", "--method", name, "--output", str(site / "run")]) == 2
    assert not (site / "run").exists()
    assert f"error: {str(told.value)[:60]}" in capsys.readouterr().err
    assert LLM["fedavg"].takes_mean
    assert parse_settings(["--method", "fedavg"]).run.method == "fedavg"
    (found,) = (one for one in doctor.examined() if one.what == f"method {name}")
    assert found.missing == str(told.value)
    assert not found.needed


def test_a_block_of_a_method_that_is_out_of_order_disturbs_no_other_one(site, monkeypatch):
    write_package(site, "raises", "1 / 0", llm={"raises": "raises:METHOD"})
    write_package(site, "acme-fl", GOOD_LLM, llm={"acme": "acme_fl:METHOD"})
    use(monkeypatch, site)
    path = site / "settings.yaml"
    path.write_text((CONFIGS / "demo.yaml").read_text() + "raises: {speed: 9}\nacme: {weighting: examples}\n")
    assert parse_settings(["--config", str(path), "--method", "fedavg"]).method.weighting == "uniform"
    assert parse_settings(["--config", str(path), "--method", "acme"]).method.weighting == "examples"
    path.write_text(path.read_text().replace("weighting: examples", "weighting: mine"))
    with pytest.raises(ValueError, match=r"acme: got weighting"):
        parse_settings(["--config", str(path), "--method", "fedavg"])


def test_the_name_of_a_built_in_method_is_refused_with_both_packages(site, monkeypatch, capsys):
    write_package(site, "acme-fl", GOOD_LLM, llm={"fedavg": "acme_fl:METHOD"})
    use(monkeypatch, site)
    message = "got the method fedavg from acme-fl 1.0 and from fedecider itself, expected different names"
    with pytest.raises(ValueError, match=message):
        LLM["fedavg"]
    assert list(LLM) == list(BUILT_IN)
    assert main(["federate", "--method", "fedavg"]) == 2
    assert message in capsys.readouterr().err
    assert parse_settings(["--method", "local"]).run.method == "local"


def test_one_name_in_both_tracks_is_refused(site, monkeypatch, capsys):
    write_package(site, "acme-fl", GOOD_LLM, llm={"mine": "acme_fl:METHOD", "fedmf": "acme_fl:METHOD"})
    points = {"mine": "other_fl:METHOD", "fedavg": "other_fl:METHOD"}
    write_package(site, "other-fl", GOOD_EMBEDDING, embedding=points)
    use(monkeypatch, site)
    message = r"from acme-fl 1\.0 \(the cross-silo track\) and from other-fl 1\.0 \(the cross-device track\)"
    for registry in (LLM, EMBEDDING):
        with pytest.raises(ValueError, match=message):
            registry["mine"]
    with pytest.raises(ValueError, match=r"method fedmf from acme-fl 1\.0 and from fedecider itself"):
        track_of("fedmf")
    with pytest.raises(ValueError, match=r"method fedavg from other-fl 1\.0 and from fedecider itself"):
        track_of("fedavg")
    for command in ("federate", "deploy simulate"):
        assert main([*command.split(), "--method", "fedmf"]) == 2
        assert "from acme-fl 1.0 and from fedecider itself" in capsys.readouterr().err
    assert track_of("local").name == "llm"
    assert track_of("pfedrec").name == "embedding"
    told = {one.what: one.missing for one in doctor.examined()}
    assert all("expected different names" in told[f"method {name}"] for name in ("mine", "fedmf", "fedavg"))


def test_names_that_options_have_are_refused(site, monkeypatch):
    write_package(site, "acme-fl", GOOD_LLM, llm={"seed": "acme_fl:METHOD"})
    own = "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Config:\n    seed: int = 0\n"
    own += f"{GOOD_LLM}METHOD = METHOD._replace(config=Config)\n"
    write_package(site, "other-fl", own, llm={"other": "other_fl:METHOD"})
    use(monkeypatch, site)
    with pytest.raises(ValueError, match="got a method with the name seed, expected another name"):
        parse_settings(["--method", "seed"])
    with pytest.raises(ValueError, match="got the setting seed in Config, expected another name: RunConfig has it"):
        parse_settings(["--method", "other"])
    assert parse_settings(["--method", "local", "--seed", "3"]).run.seed == 3


def test_settings_of_a_package_that_is_not_installed_name_it(site, monkeypatch):
    config = {"run": {"method": "acme"}, "package": {"name": "acme-fl", "version": "0.9"}}
    with pytest.raises(ValueError, match=r"got the method acme of acme-fl 0\.9 in run\.json, expected that"):
        LLM.check_recorded(config, "run.json")
    write_package(site, "acme-fl", GOOD_LLM, llm={"acme": "acme_fl:METHOD"})
    use(monkeypatch, site)
    LLM.check_recorded(config, "run.json")
    with pytest.raises(ValueError, match=r"where there is acme-fl 1\.0\. Run: pip install 'acme-fl==0\.9'"):
        LLM.check_recorded(config, "project.json", exact=True)
    LLM.check_recorded(json.loads('{"run": {"method": "fedavg"}}'), "run.json")
