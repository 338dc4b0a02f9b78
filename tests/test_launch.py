from fedecider.running.launch import requested_processes


def test_the_launcher_line_is_read():
    line = ["python", "/x/bin/accelerate", "launch", "--cpu", "--num_processes", "2", "scripts/federate.py"]
    assert requested_processes([["bash"], line]) == 2
    assert requested_processes([[*line[:4], "--num-processes=3"]]) == 3
    assert requested_processes([["accelerate", "launch", "scripts/federate.py"]]) is None
    assert requested_processes([["python", "x.py", "--num_processes", "4"]]) is None
