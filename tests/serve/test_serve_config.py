"""Settings of the service: bounds, the key, who may be let in without one."""

import pytest

from fedecider.serve.config import Limits, ServeConfig, api_key, is_local, known_hosts
from fedecider.serve.guard import host_name

KEY = "0123456789abcdef"


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_history", 0), ("max_body", 63), ("window_ms", -1.0), ("window_ms", 1001.0), ("timeout_s", 0.0)],
)
def test_limits_out_of_bounds_are_refused(field, value):
    with pytest.raises(ValueError, match=f"got {field}"):
        Limits(**{field: value})


@pytest.mark.parametrize("port", [-1, 65536, "http"])
def test_a_port_out_of_bounds_is_refused(port):
    with pytest.raises(ValueError, match="got port"):
        ServeConfig(run="x", port=port)


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("example.org", False),
        ("", False),
    ],
)
def test_only_addresses_of_this_machine_need_no_key(host, local):
    assert is_local(host) == local
    config = ServeConfig(run="x", host=host)
    if local:
        assert api_key(config, {}) == ""
    else:
        with pytest.raises(ValueError, match=r"without an API key.*--without_key true"):
            api_key(config, {})
    assert api_key(ServeConfig(run="x", host=host, without_key=True), {}) == ""
    assert api_key(config, {"FEDECIDER_API_KEY": KEY}) == KEY


def test_the_key_of_a_file_comes_before_that_of_the_environment(tmp_path):
    (tmp_path / "key").write_text(f"{KEY}-of-the-file\n")
    config = ServeConfig(run="x", api_key_file=str(tmp_path / "key"))
    assert api_key(config, {"FEDECIDER_API_KEY": KEY}) == f"{KEY}-of-the-file"
    with pytest.raises(
        ValueError, match=r"cannot read .*none \(No such file or directory\), expected a file with the API"
    ):
        api_key(ServeConfig(run="x", api_key_file=str(tmp_path / "none")), {})


@pytest.mark.parametrize("key", ["", "short", "x" * 513, "with blanks in it 123", "ä" * 20, "0123456789abcdef\x7f"])
def test_a_key_that_could_be_guessed_or_not_be_sent_is_refused(key):
    with pytest.raises(ValueError, match=f"got an API key of {len(key)} characters in FEDECIDER_API_KEY") as told:
        api_key(ServeConfig(run="x"), {"FEDECIDER_API_KEY": key})
    assert not key or key not in str(told.value)


def test_a_file_of_bytes_is_no_key(tmp_path):
    (tmp_path / "key").write_bytes(b"\xff\xfe" * 20)
    with pytest.raises(ValueError, match="got an API key of 40 characters"):
        api_key(ServeConfig(run="x", api_key_file=str(tmp_path / "key")), {})


def test_names_by_which_requests_may_call():
    assert "localhost" in known_hosts(ServeConfig(run="x"))
    assert known_hosts(ServeConfig(run="x", host="0.0.0.0")) == ["*"]
    local = ["localhost", "127.0.0.1", "::1"]
    assert known_hosts(ServeConfig(run="x")) == local
    assert known_hosts(ServeConfig(run="x", allowed_hosts="A.org, b.org,[::2]")) == [*local, "a.org", "b.org", "::2"]
    assert known_hosts(ServeConfig(run="x", host="0.0.0.0", allowed_hosts="a.org")) == [*local, "a.org"]
    assert known_hosts(ServeConfig(run="x", host="127.8.8.8", allowed_hosts="a.org")) == [*local, "127.8.8.8", "a.org"]
    assert [host_name(name) for name in ("A.ORG:80", "[FE80::A]:80")] == ["a.org", "fe80::a"]
