"""Settings of the service: bounds, the key, who may be let in without one."""

import pytest

from fedecider.serve.config import ServeConfig, api_key, is_local

KEY = "0123456789abcdef"


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
