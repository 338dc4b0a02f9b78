"""Settings of the service: bounds, the key, who may be let in without one."""

import pytest

from fedecider.serve.config import ServeConfig, api_keys, is_local
from fedecider.serve.keys import Rate

KEY = "0123456789abcdef"


def named(config, environment, key):
    """Whose key it is."""
    return api_keys(config, environment).name_of({b"x-api-key": key.encode()})


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
        assert not api_keys(config, {}).needed
    else:
        with pytest.raises(ValueError, match=r"without an API key.*--without_key true"):
            api_keys(config, {})
    assert not api_keys(ServeConfig(run="x", host=host, without_key=True), {}).needed
    assert named(config, {"FEDECIDER_API_KEY": KEY}, KEY) == "default"
    assert named(config, {"FEDECIDER_API_KEY": KEY}, f"{KEY}x") is None


def test_the_key_of_a_file_comes_before_that_of_the_environment(tmp_path):
    (tmp_path / "key").write_text(f"{KEY}-of-the-file\n")
    config = ServeConfig(run="x", api_key_file=str(tmp_path / "key"))
    assert named(config, {"FEDECIDER_API_KEY": KEY}, f"{KEY}-of-the-file") == "default"
    assert named(config, {"FEDECIDER_API_KEY": KEY}, KEY) is None
    with pytest.raises(
        ValueError, match=r"cannot read .*none \(No such file or directory\), expected a file with the API"
    ):
        api_keys(ServeConfig(run="x", api_key_file=str(tmp_path / "none")), {})


@pytest.mark.parametrize("key", ["", "short", "x" * 513, "with blanks in it 123", "ä" * 20, "0123456789abcdef\x7f"])
def test_a_key_that_could_be_guessed_or_not_be_sent_is_refused(key):
    with pytest.raises(ValueError, match=f"got an API key of {len(key)} characters in FEDECIDER_API_KEY") as told:
        api_keys(ServeConfig(run="x"), {"FEDECIDER_API_KEY": key})
    assert not key or key not in str(told.value)


def test_keys_of_a_file_have_names_and_end_with_their_lines(tmp_path, caplog):
    path = tmp_path / "keys"
    path.write_text(f"# shops\n\nnorth {KEY}north\nsouth {KEY}south\n")
    keys = api_keys(ServeConfig(run="x", api_key_file=str(path)), {})
    asked = {name: {b"authorization": f"Bearer {KEY}{name}".encode()} for name in ("north", "south", "west")}
    assert [keys.name_of(one) for one in asked.values()] == ["north", "south", None]
    path.write_text(f"south {KEY}south\nwest {KEY}west\n")  # one is revoked, one is new
    assert [keys.name_of(one) for one in asked.values()] == [None, "south", "west"]
    path.write_text("south short\n")
    assert [keys.name_of(one) for one in asked.values()] == [None, "south", "west"]
    assert "the keys stay as they were: got an API key of 5 characters" in caplog.text
    path.unlink()
    assert keys.name_of(asked["west"]) == "west"
    assert "cannot read" in caplog.text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"a {KEY}\na {KEY}2\n", "name 'a'"),
        (f"a {KEY}\nb {KEY}\n", "name 'b' or its key twice"),
        (f"{KEY}\n{KEY}2\n", "name 'default'"),
        (f"a b {KEY}\n", "got an API key"),
        ("# none\n", "got an API key of 0 characters"),
    ],
)
def test_a_file_of_keys_that_is_not_understood_is_refused(tmp_path, text, words):
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ValueError, match=words):
        api_keys(ServeConfig(run="x", api_key_file=str(tmp_path / "keys")), {})


def test_a_key_has_so_many_requests_in_any_minute():
    now = [0.0]
    rate = Rate(2, lambda: now[0])
    assert [rate.wait_s("north") for _ in range(3)] == [0.0, 0.0, pytest.approx(30.0)]
    assert rate.wait_s("south") == 0.0
    now[0] = 29.0
    assert rate.wait_s("north") == pytest.approx(1.0)
    now[0] = 30.0
    assert rate.wait_s("north") == 0.0
    assert rate.wait_s("north") == pytest.approx(30.0)
    now[0] = 1000.0  # no more than a minute's worth is saved up
    assert [rate.wait_s("north") > 0 for _ in range(3)] == [False, False, True]
    assert {Rate(0).wait_s("north") for _ in range(9)} == {0.0}
