"""The command ``fedecider``: its commands, its help, what it finds on a machine, and completion in a shell."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from fedecider.cli import doctor
from fedecider.cli.main import COMMANDS, main
from fedecider.cross_silo.command_line import parse_settings
from fedecider.running.settings_files import CONFIGS, PACKAGE, settings_file

pytestmark = pytest.mark.whole

REPOSITORY = Path(__file__).resolve().parents[1]


def test_every_command_has_a_module_and_every_module_a_command():
    modules = {path.stem for path in (PACKAGE / "cli").glob("[a-z]*.py")} - {"main"}
    assert modules == set(COMMANDS)
    for name in COMMANDS:
        assert callable(import_module(f"fedecider.cli.{name}").main)


def test_every_script_is_the_command_of_its_name():
    for path in (REPOSITORY / "scripts").glob("*.py"):
        name = path.stem.removesuffix("_data").removesuffix("_student")
        assert f"from fedecider.cli.{name} import main" in path.read_text()


def test_without_a_command_all_are_listed(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name}" in out and text in out for name, text in COMMANDS.items())


def test_an_unknown_command_is_told(capsys):
    assert main(["federat"]) == 2
    assert "federat" in capsys.readouterr().err


def test_help_calls_the_program_by_its_command(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fedecider"])
    with pytest.raises(SystemExit) as stop:
        main(["report", "--help"])
    assert stop.value.code == 0
    assert "usage: fedecider report [--config FILE]" in capsys.readouterr().out


def test_files_of_settings_come_with_the_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert CONFIGS == REPOSITORY / "configs"
    assert settings_file("configs/demo.yaml") == CONFIGS / "demo.yaml"
    assert settings_file("configs/deepspeed/zero2.json") == CONFIGS / "deepspeed" / "zero2.json"
    settings = parse_settings(["--config", "configs/companies.yaml"])
    assert (settings.run.domain_names, settings.run.num_rounds) == (["*"], 20)
    assert parse_settings(["--config=configs/companies.yaml"]) == settings
    own = tmp_path / "configs" / "demo.yaml"
    own.parent.mkdir()
    own.write_text("num_rounds: 7\n")
    assert settings_file("configs/demo.yaml") == Path("configs/demo.yaml")  # one's own file comes first
    assert parse_settings(["--config", "configs/demo.yaml"]).run.num_rounds == 7
    assert settings_file("configs/other.yaml") == Path("configs/other.yaml")
    assert settings_file("configs") == Path("configs")


def test_the_doctor_says_what_is_missing_and_how_to_get_it(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("FEDECIDER_DATA", str(tmp_path / "nowhere"))
    monkeypatch.setattr(doctor, "requires", lambda _: ["torch>=2.8", 'nosuchthing>=1; extra == "gpu"'])
    monkeypatch.chdir(tmp_path)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "lacks nosuchthing" in out
    assert ".[gpu]" in out  # no markup
    found = {one.what: one for one in doctor.examined()}
    assert "pip install '.[gpu]'" in found["extra gpu"].missing
    assert " than fp32 here" in found["precision auto"].found
    assert (found["extra dp"].found, found["extra dp"].missing) == ("not known", "")  # it asks for nothing here
    assert main(["doctor", "--frob"]) == 2
    assert "--frob" in capsys.readouterr().err
    assert found["data sets"].found == "none found"
    assert "FEDECIDER_DATA" in found["data sets"].missing
    (tmp_path / "nowhere" / "ml-100k").mkdir(parents=True)
    assert [one.found for one in doctor.examined() if one.what == "data sets"] == ["ml-100k"]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [("nosuchthing>=1", "nosuchthing: not installed"), ("torch>=99", "torch: 2")],
)
def test_the_doctor_fails_where_something_needed_is_missing(capsys, monkeypatch, wanted, expected):
    monkeypatch.setattr(doctor, "requires", lambda _: [wanted])
    assert main(["doctor"]) == 2
    assert f"error: got {expected}" in capsys.readouterr().err


def test_a_shell_completes_commands_options_and_values(tmp_path, capsys):
    assert main(["completion", "bash"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)

    def completed(*words):
        line = " ".join(f"'{word}'" for word in words)
        code = (
            f'. ./script; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _shtab_fedecider; echo "${{COMPREPLY[@]}}"'
        )
        done = subprocess.run(["bash", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.split()

    assert completed("fedecider", "rec") == ["recommend"]
    assert completed("fedecider", "recommend", "--hist") == ["--history"]
    assert completed("fedecider", "federate", "--alpha_i") == ["--alpha_init"]  # of the one track
    assert completed("fedecider", "federate", "--datas") == ["--dataset"]  # of the other
    assert completed("fedecider", "federate", "--precision", "b") == ["bf16"]
    assert completed("fedecider", "deploy", "si") == ["simulate"]


def test_another_shell_is_refused(capsys):
    assert main(["completion", "fish"]) == 2
    assert "fish" in capsys.readouterr().err
