"""The number format: what runs in bf16, and what ``auto`` becomes on a machine that is fast or slow with it."""

import pytest
import torch

from fedecider.cross_silo import command_line as commands
from fedecider.cross_silo.command_line import parse_settings
from idgen import precision
from idgen.precision import autocast, bf16_speedup, fastest

AUTO = ["--precision", "auto"]
CPU = torch.device("cpu")


@pytest.fixture
def machine(monkeypatch):
    """A machine that is so many times faster in bf16."""

    def is_faster(times: float) -> None:
        monkeypatch.setattr(precision, "bf16_speedup", lambda device_type: times)
        commands._log.cache_clear()

    return is_faster


def dtype_under(name: str) -> torch.dtype:
    with autocast(CPU, name):
        return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


def test_the_speedup_is_measured():
    assert 0 < bf16_speedup("cpu") < 100
    assert fastest("cpu") == ("bf16" if bf16_speedup("cpu") >= precision.PAYS else "fp32")


def test_a_moment_in_which_the_machine_is_busy_does_not_choose_the_format(monkeypatch):
    clock_s = [0.0]

    def linear(square_NN, weight_NN):
        busy = 10.0 if 0.012 <= clock_s[0] <= 0.2 else 1.0
        clock_s[0] += busy * (1e-3 if square_NN.dtype == torch.bfloat16 else 2e-3)
        return square_NN

    monkeypatch.setattr(precision.F, "linear", linear)
    monkeypatch.setattr(precision.time, "perf_counter", lambda: clock_s[0])
    assert bf16_speedup.__wrapped__("cpu") == pytest.approx(2.0)


def test_products_run_in_the_format_that_is_asked_for(machine):
    assert (dtype_under("fp32"), dtype_under("bf16")) == (torch.float32, torch.bfloat16)
    machine(2.0)
    assert dtype_under("auto") == torch.bfloat16
    machine(1.1)  # not worth the rounding
    assert dtype_under("auto") == torch.float32


@pytest.mark.parametrize(("times", "chosen"), [(2.0, "bf16"), (0.02, "fp32")])
def test_auto_is_settled_before_anything_is_kept_under_it(machine, capsys, times, chosen):
    machine(times)
    settings = parse_settings(AUTO)
    parse_settings(AUTO)
    found = (settings.training.precision, settings.run.distill.precision, settings.run.pretrain.train.precision)
    assert found == (chosen,) * 3
    told = "2.0 times faster" if times > 1 else "50.0 times slower"
    assert capsys.readouterr().err.splitlines() == [
        f"precision auto is {chosen}: products of matrices are {told} in bf16 than in fp32 here"
    ]


@pytest.mark.parametrize("option", ["distill.precision", "pretrain.train.precision"])
def test_stages_have_no_format_of_their_own(option):
    with pytest.raises(ValueError, match=f"got {option}"):
        parse_settings([f"--{option}", "bf16"])


def test_slow_bf16_is_told_by_the_first_process_and_done_all_the_same(machine, capsys, monkeypatch):
    machine(0.25)
    settings = parse_settings(["--precision", "bf16"])
    assert settings.training.precision == "bf16"
    expected = "warning: precision bf16 is 4.0 times slower than fp32 on this machine; set it to fp32 or auto\n"
    assert capsys.readouterr().err == expected
    machine(0.25)
    monkeypatch.setenv("RANK", "1")
    parse_settings(["--precision", "bf16"])
    assert capsys.readouterr().err == ""
