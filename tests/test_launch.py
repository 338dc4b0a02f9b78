import pytest

from fedecider.running.launch import check_deepspeed, requested_processes


def test_the_launcher_line_is_read():
    line = ["python", "/x/bin/accelerate", "launch", "--cpu", "--num_processes", "2", "scripts/federate.py"]
    assert requested_processes([["bash"], line]) == 2
    assert requested_processes([[*line[:4], "--num-processes=3"]]) == 3
    assert requested_processes([["accelerate", "launch", "scripts/federate.py"]]) is None
    assert requested_processes([["python", "x.py", "--num_processes", "4"]]) is None


def test_deepspeed_needs_its_package_and_one_process(monkeypatch):
    monkeypatch.setattr("fedecider.running.launch.find_spec", lambda package: None)
    with pytest.raises(ValueError, match="deepspeed is not installed"):
        check_deepspeed(1)
    monkeypatch.setattr("fedecider.running.launch.find_spec", lambda package: package)
    check_deepspeed(1)
    with pytest.raises(ValueError, match="got 2 processes with DeepSpeed, expected 1"):
        check_deepspeed(2)
