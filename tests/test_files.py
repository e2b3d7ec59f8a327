"""Reading user files: any bytes either parse to plain data or raise FileFormatError; writing is all or nothing."""

import json
import math
import os
import resource
import signal

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from autoshard.errors import FileFormatError
from autoshard.files import append_text, read_json, read_yaml, write_text_atomically, yaml_text

FUZZ = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

YAML_PIECES = st.lists(
    st.sampled_from(
        ["a", ": ", "- ", "\n", "  ", "{", "}", "[", "]", ",", "&x ", "*x", "!!int ", "!t ", "'", '"', "|\n", ">-\n"]
        + ["1e9", ".inf", ".nan", "0x1f", "1_0", "?", "#", "%YAML 1.1\n", "---\n", "...\n", "<<", "\t", "~", "\\ud800"]
        + ["1e999", "\x00", "\u2028", "\ufeff", "=", "2020-01-01", "1:30", "-", "+", "._", "9" * 5000]
    ),
    max_size=20,
).map("".join)
JSON_PIECES = st.lists(
    st.sampled_from(
        ["{", "}", "[", "]", ":", ",", '"a"', '"\\ud800"', "NaN", "-Infinity", "1e999", "1", "null", "true", "\x00"]
        + ["9" * 5000, "[" * 500, " ", '"', "\ufeff", "0.5", "\\"]
    ),
    max_size=20,
).map("".join)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT
    | st.sampled_from(
        ["1e9", "010", "yes", "~", "", "true", ".inf", "1_0", "<<", "=", "- a", "a: b", "#", "\x85", "2020-01-01"]
    )
)
PLAIN = st.recursive(
    SCALARS, lambda part: st.lists(part, max_size=4) | st.dictionaries(TEXT, part, max_size=4), max_leaves=12
)


def is_plain(data):
    """Whether the data holds nothing but what the readers promise."""
    if isinstance(data, dict):
        return all(is_plain(key) and is_plain(value) for key, value in data.items())
    if isinstance(data, list):
        return all(is_plain(part) for part in data)
    if isinstance(data, str):
        return data.encode() is not None
    return data is None or isinstance(data, bool | int) or (isinstance(data, float) and math.isfinite(data))


def check_reader(reader, path, content):
    path.write_bytes(content)
    try:
        data = reader(path)
    except FileFormatError as error:
        assert str(path) in str(error)
    else:
        assert is_plain(data)


@FUZZ
@given(content=st.binary(max_size=200) | st.text(max_size=100).map(lambda s: s.encode(errors="surrogatepass")))
def test_any_bytes_parse_or_are_refused(tmp_path, content):
    check_reader(read_yaml, tmp_path / "f", content)
    check_reader(read_json, tmp_path / "f", content)


@FUZZ
@given(text=YAML_PIECES)
@example('"\\UFFFFFFFF"')
@example("!!python/object/apply:os.system [ls]")
@example("? - a\n")
def test_any_yaml_like_text_parses_or_is_refused(tmp_path, text):
    check_reader(read_yaml, tmp_path / "f", text.encode())


@FUZZ
@given(text=JSON_PIECES)
def test_any_json_like_text_parses_or_is_refused(tmp_path, text):
    check_reader(read_json, tmp_path / "f", text.encode())


@FUZZ
@given(data=PLAIN)
def test_what_yaml_text_writes_is_read_back(tmp_path, data):
    path = tmp_path / "f"
    write_text_atomically(path, yaml_text(data))
    read = read_yaml(path)
    assert read == data
    assert repr(read) == repr(data)  # also tells 1 from 1.0 and from True


@FUZZ
@given(data=PLAIN)
def test_json_is_read_as_the_standard_library_reads_it(tmp_path, data):
    path = tmp_path / "f"
    path.write_text(json.dumps(data), encoding="utf-8")
    assert read_json(path) == data


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1e9", 1e9),
        ("80e9", 80e9),
        ("4.5E-3", 4.5e-3),
        ("-.5", -0.5),
        ("1.", 1.0),
        ("1_000_000", 1_000_000),
        ("010", 10),
        ("0x10", "0x10"),
        ("yes", "yes"),
        ("on", "on"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("true", True),
        ("~", None),
        ("", None),
        ("'1e9'", "1e9"),
        ("\ufeffa", "a"),
    ],
)
def test_plain_scalars(tmp_path, text, expected):
    path = tmp_path / "f.yaml"
    path.write_text(text, encoding="utf-8")
    data = read_yaml(path)
    assert data == expected
    assert type(data) is type(expected)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: &x [1]\nb: *x", "anchors and aliases"),
        ("a: *x", "anchors and aliases"),
        ("!!python/name:os.system", "tags"),
        ("a: 1\nb: 2\na: 3", "'a' is given twice"),
        ("a: .inf", "not finite"),
        ("a: 1e999", "not finite"),
        ("- " * 65 + "a", "levels of nesting"),
        ("[" * 100_000, "levels of nesting"),
        ("a: 1\n---\nb: 2", "not plain YAML"),
        ("a: 'b", "not plain YAML"),
        ("[a]: 1", "a key must be a scalar"),
    ],
)
def test_yaml_is_refused_with_the_reason(tmp_path, text, reason):
    path = tmp_path / "f.yaml"
    path.write_text(text)
    with pytest.raises(FileFormatError, match=reason):
        read_yaml(path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a": 1, "a": 2}', "'a' is given twice"),
        ("[NaN]", "not finite"),
        ("[-Infinity]", "not finite"),
        ("[1e999]", "finite"),
        ("[" * 100 + "]" * 100, "levels of nesting"),
        ("[" * 200_000, "nested too deeply"),
        ('"\\ud800"', "surrogates"),
        ("", "not plain JSON"),
    ],
)
def test_json_is_refused_with_the_reason(tmp_path, text, reason):
    path = tmp_path / "f.json"
    path.write_text(text)
    with pytest.raises(FileFormatError, match=reason):
        read_json(path)


@pytest.mark.parametrize("reader", [read_yaml, read_json])
def test_unreadable_files(tmp_path, reader):
    with pytest.raises(FileFormatError, match="No such file"):
        reader(tmp_path / "none")
    with pytest.raises(FileFormatError, match="directory"):
        reader(tmp_path)
    with pytest.raises(FileFormatError, match="null byte"):
        reader("a\0b")
    (tmp_path / "latin").write_bytes(b"a: \xe9")
    with pytest.raises(FileFormatError, match="byte 3 is not"):
        reader(tmp_path / "latin")
    (tmp_path / "big").write_text("1" * 11)
    with pytest.raises(FileFormatError, match="at most 10 bytes"):
        reader(tmp_path / "big", max_bytes=10)
    (tmp_path / "fits").write_text("1" * 10)
    assert reader(tmp_path / "fits", max_bytes=10) == 1111111111


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_pipe_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileFormatError, match="regular files"):
        read_yaml(tmp_path / "pipe")


def test_writing_replaces_the_whole_file_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "f"
    write_text_atomically(path, "long old content\n")
    write_text_atomically(path, "é\n")
    assert path.read_bytes() == "é\n".encode()
    assert os.listdir(tmp_path) == ["f"]


def test_writing_follows_a_symbolic_link(tmp_path):
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    write_text_atomically(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "new"


def test_failed_writing_leaves_the_old_file(tmp_path):
    path = tmp_path / "f"
    path.write_text("old")
    with pytest.raises(FileFormatError, match="surrogates"):
        write_text_atomically(path, "\ud800")
    assert path.read_text() == "old"
    with pytest.raises(FileFormatError, match="directory"):
        write_text_atomically(tmp_path, "new")
    with pytest.raises(FileFormatError, match="No such file"):
        write_text_atomically(tmp_path / "none" / "f", "new")
    assert os.listdir(tmp_path) == ["f"]


def test_text_is_added_whole_or_not_at_all(tmp_path):
    path = tmp_path / "f"
    append_text(path, "a\n")
    append_text(path, "\u00e9\n")
    assert path.read_text(encoding="utf-8") == "a\n\u00e9\n"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, hard))
    try:
        with pytest.raises(OSError):
            append_text(path, "0123456789\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_text(encoding="utf-8") == "a\n\u00e9\n"
