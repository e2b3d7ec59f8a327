"""Click logs: lines by number, parsing against plain Python, hashing, order of epochs, errors with file and line."""

import gzip
import math
import pathlib

import numpy as np
import pytest
import typer.testing
from autoshard_models import dlrm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoshard.cli import app
from autoshard.errors import ConfigError, FileFormatError
from autoshard.train.config import TrainConfig
from autoshard.train.data.criteo import (
    MISSING,
    NUM_CATEGORIES,
    NUM_NUMBERS,
    Clicks,
    MalformedLineError,
    as_batch,
    criteo_batches,
    parsed,
)
from autoshard.train.data.line_files import EVERY, line_starts, open_lines, runs_of
from autoshard.train.data.made_clicks import MadeClicks, write_clicks
from autoshard.train.registry import load_data

QUICK = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
ROWS = [100] * NUM_CATEGORIES


def as_array(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)


def line(label: object = 0, **fields: str) -> str:
    """A line of zeros and hashes `a`, with the fields `f2`, `f3` ... replaced; fields count from 1."""
    values = [str(label), *["0"] * NUM_NUMBERS, *["a"] * NUM_CATEGORIES]
    for name, value in fields.items():
        values[int(name[1:]) - 1] = value
    return "\t".join(values) + "\n"


# ---- lines by number


@QUICK
@given(st.lists(st.lists(st.integers(0, 9), max_size=150), min_size=1, max_size=3), st.booleans(), st.data())
def test_lines_are_read_by_number_across_files(tmp_path, sizes, has_last_end, data):
    for old in tmp_path.iterdir():
        old.unlink()
    lines = []
    for number, lengths in enumerate(sizes):
        own = [f"{number}{k}" + "x" * length for k, length in enumerate(lengths)]
        text = "".join(f"{x}\n" for x in own)
        (tmp_path / f"day_{number}").write_text(text if has_last_end else text[:-1])
        lines += own
    if not lines:
        with pytest.raises(ConfigError, match="at least one line"):
            open_lines(tmp_path)
        return
    log = open_lines(tmp_path)
    assert log.num_lines == len(lines)
    first = data.draw(st.integers(0, len(lines) - 1))
    stop = data.draw(st.integers(first + 1, len(lines)))
    assert log.read(first, stop).tobytes().decode() == "".join(f"{x}\n" for x in lines[first:stop])


@QUICK
@given(st.binary(min_size=1, max_size=400).map(lambda x: x.replace(b"a", b"\n")), st.integers(1, 50))
def test_a_file_is_searched_in_pieces_of_any_size(content, piece_bytes):
    starts, num_lines = line_starts(np.frombuffer(content, np.uint8), piece_bytes)
    lines = content.split(b"\n")[:-1] if content.endswith(b"\n") else content.split(b"\n")
    begins = np.cumsum([0, *(len(x) + 1 for x in lines)])
    assert num_lines == len(lines) and starts.tolist() == begins[:num_lines:EVERY].tolist()


def test_what_was_found_in_a_file_is_kept_until_the_file_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOSHARD_CACHE", str(tmp_path / "cache"))
    log = tmp_path / "log"
    log.write_text("a\nb\n")
    assert open_lines(log).num_lines == 2
    (kept,) = (tmp_path / "cache").iterdir()
    np.save(kept, [1, 0])  # believed, since the file is as it was
    assert open_lines(log).num_lines == 1
    kept.write_bytes(b"damaged")
    assert open_lines(log).num_lines == 2
    log.write_text("a\nb\nc\n")
    assert open_lines(log).num_lines == 3


def test_files_that_cannot_be_read_by_line_are_refused(tmp_path):
    (tmp_path / "day_0.gz").write_bytes(gzip.compress(b"a\n"))
    with pytest.raises(FileFormatError, match="compressed. Unpack it"):
        open_lines(tmp_path)
    with pytest.raises(ConfigError, match="none cannot be read: No such file"):
        open_lines(tmp_path / "none")


def test_runs_keep_the_order():
    assert runs_of(np.array([5, 6, 7, 1, 2, 3, 3])) == [(5, 8), (1, 4), (3, 4)]


# ---- parsing


def plainly(text: str) -> tuple[list[int], list[list[int]], list[list[int]]]:
    """The same by Python's own means."""
    rows = [one.split("\t") for one in text.splitlines()]
    return (
        [int(row[0]) for row in rows],
        [[int(x or 0) for x in row[1:14]] for row in rows],
        [[int(x, 16) if x else MISSING for x in row[14:]] for row in rows],
    )


NUMBERS = st.one_of(st.just(""), st.integers(-(10**18) + 1, 10**18 - 1).map(str), st.integers(-2, 30).map(str))
HASHES = st.one_of(st.just(""), st.integers(0, 2**32 - 1).map(lambda x: f"{x:08x}"), st.sampled_from(["F", "0aB"]))


@QUICK
@given(
    st.lists(
        st.tuples(
            st.sampled_from("01"),
            st.lists(NUMBERS, min_size=NUM_NUMBERS, max_size=NUM_NUMBERS),
            st.lists(HASHES, min_size=NUM_CATEGORIES, max_size=NUM_CATEGORIES),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_lines_are_parsed_as_python_would(rows):
    text = "".join("\t".join([label, *numbers, *hashes]) + "\n" for label, numbers, hashes in rows)
    found, (labels, numbers, hashes) = parsed(as_array(text)), plainly(text)
    assert found.labels.tolist() == labels
    assert found.numbers.tolist() == numbers and found.hashes.tolist() == hashes


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (line(label=2), "field 1 is not a label, 0 or 1, but '2'"),
        (line(label=""), "field 1 is not a label"),
        (line(label="01"), "field 1 is not a label"),
        (line(label="-0"), "field 1 is not a label"),
        (line(f2="1.5"), "field 2 is not a whole number but '1.5'"),
        (line(f14="-"), "field 14 is not a whole number but '-'"),
        (line(f3="--1"), "field 3 is not a whole number"),
        (line(f3="1" * 19), "field 3 is not a whole number"),
        (line(f15="xyz"), "field 15 is not a hash of 32 bits but 'xyz'"),
        (line(f40="-1"), "field 40 is not a hash"),
        (line(f40="123456789"), "field 40 is not a hash"),
        (line(f40="a\r"), "field 40 is not a hash"),
        (line(f40="a\ta"), "it has 41 fields"),
        (line().split("\t", 1)[1], "it has 39 fields"),
        ("\n", "it has 1 fields"),
    ],
)
def test_malformed_lines_are_told(bad, told, tmp_path):
    with pytest.raises(MalformedLineError, match=told) as error:
        parsed(as_array(line() * 3 + bad + line()))
    assert error.value.line == 3
    (tmp_path / "day_0").write_text(line())
    (tmp_path / "day_1").write_text(line() + bad + line() * 9)
    batches = criteo_batches(open_lines(tmp_path), "train", batch_size=4, seed=0, eval_fraction=0.1, table_rows=ROWS)
    with pytest.raises(FileFormatError, match=f"day_1, line 2: a line must have a label, .*{told}"):
        batches[0]


def test_many_lines_are_parsed_as_few_are(tmp_path):
    """More than are parsed at once; the fault is in a later part."""
    made = MadeClicks(9000, seed=5)
    write_clicks(tmp_path / "log", made)
    text = (tmp_path / "log").read_text()
    found, (labels, numbers, hashes) = parsed(as_array(text)), plainly(text)
    np.testing.assert_array_equal(found.labels, labels)
    np.testing.assert_array_equal(found.numbers, numbers)
    np.testing.assert_array_equal(found.hashes, hashes)
    with pytest.raises(MalformedLineError) as error:
        parsed(as_array(text + line(f2="x")))
    assert error.value.line == 9000


def test_numbers_and_hashes_become_what_the_model_reads():
    """log(max(x, 0) + 1); row 1 + h mod (n - 1), and row 0 for what is missing or for a table of one row."""
    numbers = np.array([[0, -2, 1, 7, *[0] * 9]])
    hashes = np.array([[MISSING, 0, 8, 9, 0xFFFFFFFF, 5, *[0] * 20]])
    rows = [10, 10, 10, 10, 40_000_512, 1, *[2] * 20]
    batch = as_batch(Clicks(np.array([1]), numbers, hashes), rows)
    np.testing.assert_allclose(batch["numbers"][0, :4], [0, 0, math.log(2), math.log(8)], rtol=1e-6)
    large = 1 + 0xFFFFFFFF % 40_000_511
    assert batch["categories"][0].tolist() == [0, 1, 9, 1, large, 0, *[1] * 20]
    assert batch["clicks"].tolist() == [1]
    stated = dlrm.batch_shapes(dlrm.PRESETS["criteo_tiny"], 1)
    assert {n: (x.shape, x.dtype) for n, x in batch.items()} == {n: (x.shape, x.dtype) for n, x in stated.items()}


# ---- batches


@pytest.fixture(scope="module")
def numbered(tmp_path_factory) -> pathlib.Path:
    """205 lines in two files; the first number of each line is its place."""
    folder = tmp_path_factory.mktemp("log")
    for name, places in (("day_0", range(70)), ("day_1", range(70, 205))):
        (folder / name).write_text("".join(line(label=k % 2, f2=str(k)) for k in places))
    return folder


def places_in(batches, steps) -> list[int]:
    found = np.concatenate([batches[step]["numbers"][:, 0] for step in steps])
    return np.rint(np.expm1(found)).astype(int).tolist()


def test_each_line_is_seen_once_an_epoch_and_held_out_ones_never(numbered):
    """205 lines, of which 21 are held out; 184 are 23 batches of 8 and five runs of 32 with 24 lines behind."""
    of = lambda part, seed=3: criteo_batches(
        open_lines(numbered), part, batch_size=8, seed=seed, eval_fraction=0.103, table_rows=ROWS
    )
    first, second = places_in(of("train"), range(23)), places_in(of("train"), range(23, 46))
    assert sorted(first) == sorted(second) == list(range(184)) and first != second
    assert first[160:] == second[160:] == list(range(160, 184))
    assert all(run[0] % 32 == 0 and np.all(np.diff(run) == 1) for run in np.split(np.array(first[:160]), 5))
    assert places_in(of("train", seed=4), range(23)) != first
    held_out = list(range(184, 205))
    assert places_in(of("eval"), range(6)) == (held_out * 3)[:48]


def test_batches_depend_on_seed_and_step_and_examples_alone(numbered):
    config = TrainConfig.model_validate(
        {
            "model": {"name": "dlrm", "preset": "criteo_tiny"},
            "data": {"name": "criteo", "path": str(numbered), "batch_size": 24},
        }
    )
    data, again = load_data(config), load_data(config)
    for step in (1000, 3, 0):
        whole, other = data.batches[step], again.batches[step]
        some = data.batches.rows(step, np.array([0, 5, 6, 23]))
        for name, array in whole.items():
            assert array.tobytes() == other[name].tobytes()
            assert array[[0, 5, 6, 23]].tobytes() == some[name].tobytes()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"model": {"name": "dlrm", "preset": "criteo_tiny"}, "data": {"name": "criteo"}}, "autoshard clicks FILE"),
        ({"model": {"name": "dlrm"}, "data": {"name": "criteo", "path": "x"}}, "the model reads 4 numbers and 4 ids"),
        (
            {
                "model": {"name": "dlrm", "preset": "criteo_tiny", "overrides": {"bag_sizes": [1] * 25 + [2]}},
                "data": {"name": "criteo", "path": "x"},
            },
            "and 27 ids",
        ),
    ],
)
def test_unfitting_logs_are_refused(settings, told):
    with pytest.raises(ConfigError, match=told):
        load_data(TrainConfig.model_validate(settings))


def test_one_line_is_no_log(tmp_path):
    (tmp_path / "log").write_text(line())
    with pytest.raises(ConfigError, match="a line to train on and one to evaluate on"):
        criteo_batches(open_lines(tmp_path / "log"), "train", batch_size=1, seed=0, eval_fraction=0.5, table_rows=ROWS)


# ---- made logs


def test_made_logs_are_the_same_again_and_follow_zipf(tmp_path):
    made = MadeClicks(20_000, seed=1, zipf_exponent=1.0, num_categories=3)
    write_clicks(tmp_path / "a", made)
    write_clicks(tmp_path / "b", made)
    write_clicks(tmp_path / "c", MadeClicks(20_000, seed=2, zipf_exponent=1.0, num_categories=3))
    text = (tmp_path / "a").read_bytes()
    assert text == (tmp_path / "b").read_bytes() != (tmp_path / "c").read_bytes()
    clicks = parsed(np.frombuffer(text, np.uint8))
    assert len(clicks.labels) == 20_000
    # Shares 1 : 1/2 : 1/3 of what is there, which is 19 in 20.
    for column in clicks.hashes.T:
        values, counts = np.unique(column, return_counts=True)
        assert values[0] == MISSING and len(values) == 4
        np.testing.assert_allclose(np.sort(counts) / 20_000, [0.05, *(0.95 * np.array([2, 3, 6]) / 11)], atol=0.015)
    assert np.unique(clicks.hashes).size == 1 + 3 * NUM_CATEGORIES


def test_made_categories_of_a_table_have_hashes_of_their_own(tmp_path):
    write_clicks(tmp_path / "a", MadeClicks(4000, zipf_exponent=0.0, num_categories=50))
    hashes = parsed(np.frombuffer((tmp_path / "a").read_bytes(), np.uint8)).hashes
    assert all(np.unique(column[column != MISSING]).size == 50 for column in hashes.T)


def test_impossible_logs_are_refused():
    with pytest.raises(ConfigError, match="at least one example"):
        MadeClicks(0)


def test_a_log_that_cannot_be_written_leaves_nothing_behind(tmp_path):
    (tmp_path / "folder").mkdir()
    result = typer.testing.CliRunner().invoke(app, ["clicks", str(tmp_path / "folder"), "--examples", "10"])
    assert result.exit_code == 2 and "folder cannot be written: Is a directory" in " ".join(result.output.split())
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_log_of_one_example_has_no_auc(tmp_path):
    result = typer.testing.CliRunner().invoke(app, ["clicks", str(tmp_path / "log"), "--examples", "1"])
    told = " ".join(result.output.split())
    assert result.exit_code == 0 and "Wrote 1 example to" in told and "no AUC" in told and "nan" not in told


def test_there_are_no_more_categories_than_hashes(tmp_path):
    result = typer.testing.CliRunner().invoke(app, ["clicks", str(tmp_path / "log"), "--categories", "100000000"])
    assert result.exit_code == 2 and not list(tmp_path.iterdir())
