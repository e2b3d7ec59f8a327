"""Calibration of live devices: what it writes, that it goes on where it stopped, and what it refuses."""

import io
import json
import os
import pathlib
import signal

import jax
import pytest
import rich.console

from autoshard.calibration import calibrate, run
from autoshard.calibration.display import calibrate_visibly
from autoshard.calibration.figures import measured_device
from autoshard.calibration.partial import side_file
from autoshard.calibration.probes import ELEMENTWISE_CHAIN, Measures, Probe, probes, wide_dim
from autoshard.calibration.report import report
from autoshard.cluster import Calibration, Cluster, CollectiveKind, Slice
from autoshard.errors import ClusterError, FileFormatError

CLUSTERS = pathlib.Path(__file__).parents[2] / "configs" / "clusters"


def few(hardware, dtypes, quick):
    """A probe of each kind, and two of a collective."""
    wide = wide_dim(hardware.device_type)
    reduction = {"collective": CollectiveKind.ALL_REDUCE, "size": hardware.num_devices}
    gather = {"collective": CollectiveKind.ALL_GATHER, "size": hardware.num_devices}
    return (
        Probe(Measures.LAUNCH, (8, 8, 8)),
        Probe(Measures.PRODUCT, (64, 64, 64)),
        Probe(Measures.PRODUCT, (wide, wide, wide)),
        Probe(Measures.PRODUCT, (8, wide, wide)),
        Probe(Measures.MEMORY, (1 << 16,)),
        Probe(Measures.BOTH, (1 << 14,)),
        Probe(Measures.COPY, (256, 256)),
        Probe(Measures.TRANSPOSED, (256, 256)),
        Probe(Measures.FUNCTION, (1 << 12,)),
        Probe(Measures.ELEMENTWISE, (1 << 12,)),
        *(Probe(Measures.COLLECTIVE, (size_bytes,), **reduction) for size_bytes in (4096, 65536)),
        *(Probe(Measures.COLLECTIVE, (size_bytes,), **gather) for size_bytes in (4096, 65536)),
        Probe(Measures.INNER, (128, 128), **gather),
        Probe(Measures.BESIDE, (64,)),
        Probe(Measures.INDEPENDENT, (4096, 64), **gather),
    )


@pytest.fixture
def small(monkeypatch):
    """Few probes, timed shortly."""
    monkeypatch.setattr(run, "probes", few)
    monkeypatch.setattr(run, "QUICK_TARGET_S", 1e-3)


def test_each_loop_is_relieved_of_the_kernels_that_are_not_its_operation_s():
    """Rounds take 3 s, a kernel of no work 1 s: the idle loop 4 s. A product of 7 s has such a kernel beside it; a row
    of 5 s is made by one kernel.
    """
    launch, product = Probe(Measures.LAUNCH, (8, 8, 8)), Probe(Measures.PRODUCT, (64, 64, 64))
    row = Probe(Measures.MEMORY, (1 << 16,))
    times = {run.IDLE: (3.0 + 1.0,), launch.name: (3 + 1 + 1.0,), product.name: (3 + 1 + 7.0,), row.name: (3 + 5.0,)}
    found = {probe: seconds for probe, seconds, _ in run._summary((launch, product, row), times)}
    assert found == {launch: 1.0, product: 7.0, row: 5.0}


def test_what_is_stopped_goes_on_and_ends_in_a_cluster_file(small, tmp_path):
    out = tmp_path / "cluster.yaml"
    seen = []

    def stop_at_the_fourth(now):
        seen.append(now.probe)
        if len(seen) == 4:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        calibrate(out, quick=True, on_progress=stop_at_the_fourth)
    kept = json.loads(side_file(out).read_text())["seconds"]
    assert sorted(kept) == sorted(seen) and not out.exists()

    again = []
    made = calibrate(out, quick=True, on_progress=lambda now: again.append(now.probe))
    assert not set(again) & set(seen)  # what is timed is not timed again
    assert Cluster.from_file(out) == made.cluster and not side_file(out).exists()
    device, link = made.cluster.groups[0].device_type, made.cluster.groups[0].intra_node
    assert device.provenance == f"measured on {device.measured.calibration.date}"
    assert (device.measured.calibration.jax, device.measured.calibration.device_kind) == (jax.__version__, "cpu")
    assert [(m.kind, m.size) for m in link.collectives] == [
        (CollectiveKind.ALL_REDUCE, 8),
        (CollectiveKind.ALL_GATHER, 8),
    ]
    table = report(made)
    assert "all-reduce" in table and "product float32" in table


def test_probes_have_names_of_their_own_and_fit_the_devices():
    hardware = Cluster.detect().slices()[0]
    for quick in (False, True):
        listed = probes(hardware, ("float32", "bfloat16"), quick)
        assert len({probe.name for probe in listed}) == len(listed)
        sizes = {probe.size for probe in listed if probe.collective}
        assert sizes == ({2, 8} if quick else {2, 4, 8})
    single = Cluster.from_file(CLUSTERS / "h100x8.yaml").groups[0].device_type
    assert not any(probe.collective for probe in probes(Slice("one", single, ()), ("float32",), False))


def test_ctrl_c_gives_one_message(small, tmp_path, monkeypatch):
    def stopped(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("autoshard.calibration.display.calibrate", stopped)
    console = rich.console.Console(file=io.StringIO())
    assert calibrate_visibly(tmp_path / "c.yaml", None, True, False, console) is None
    assert "the same command goes on from there" in console.file.getvalue()


def test_a_damaged_or_foreign_side_file_is_refused(small, tmp_path):
    out = tmp_path / "cluster.yaml"
    path = side_file(out)
    good = {
        "format": "autoshard-calibration",
        "version": 1,
        "setting": {"jax": "0.0", "device_kind": "cpu", "num_devices": 8, "quick": True, "dtypes": ["float32"]},
        "seconds": {},
    }
    for content, reason in (
        ("{", "not plain JSON"),
        ("[]", "not the side file of a calibration"),
        (json.dumps({**good, "seconds": {"idle": [-1]}}), "damaged: at seconds.idle.0"),
        (json.dumps(good), "belongs to another calibration, with jax '0.0' instead of"),
    ):
        path.write_text(content)
        with pytest.raises(FileFormatError, match=reason):
            calibrate(out, quick=True)
        assert path.read_text() == content


def test_what_cannot_be_measured_or_written_is_refused_at_once(small, tmp_path, monkeypatch):
    with pytest.raises(FileFormatError, match="cannot be written"):
        calibrate(tmp_path / "missing" / "cluster.yaml", quick=True)
    with pytest.raises(FileFormatError, match="is a folder. Name a file in it"):
        calibrate(tmp_path, quick=True)
    assert not side_file(tmp_path).exists()
    with pytest.raises(ClusterError, match="has 16, and JAX sees 8"):
        calibrate(tmp_path / "c.yaml", cluster=CLUSTERS / "h100x16.yaml", quick=True)
    with pytest.raises(ClusterError, match="devices of one kind"):
        calibrate(tmp_path / "c.yaml", cluster=CLUSTERS / "v100x8_p100x8.yaml", quick=True)
    monkeypatch.setattr("autoshard.cluster.catalogue.Catalogue.known_device", lambda *_: None)
    with pytest.raises(ClusterError, match="does not know 'cpu'"):
        calibrate(tmp_path / "c.yaml", quick=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["h100x8", "a100-80x8", "cpux8"])
def test_probes_of_arithmetic_wait_for_it_and_fill_the_device(name):
    """What memory takes for their arrays is less than what arithmetic takes at its peak, or a cache holds them."""
    (hardware,) = Cluster.from_file(CLUSTERS / f"{name}.yaml").slices()
    device = hardware.device_type
    threads_bytes = 4 * 108 * 2048 if device.is_gpu else 0  # one float32 for each thread of an A100
    for probe in probes(hardware, ("float32",), quick=True):
        if probe.measures in (Measures.ELEMENTWISE, Measures.FUNCTION):
            (elements,) = probe.shape
            assert threads_bytes <= 4 * elements <= (20e6 if device.is_gpu else 64 * 1024)
        if probe.measures is Measures.ELEMENTWISE and device.is_gpu:
            flops = 2 * ELEMENTWISE_CHAIN * probe.rounds * elements
            assert 8 * elements / device.memory_bandwidth_bytes_per_s < flops / dict(device.peak_flops_per_s)["float32"]


def test_rates_of_arithmetic_count_every_round():
    """8 rounds of 4 functions, and of 32 multiplications and additions, on 1000 elements in 2 s less 1 s of launch."""
    (hardware,) = Cluster.from_file(CLUSTERS / "h100x8.yaml").slices()
    wide = wide_dim(hardware.device_type)
    once = [p for p in few(hardware, (), True) if p.measures in (Measures.PRODUCT, Measures.MEMORY)]
    assert (wide, wide, wide) in {p.shape for p in once}
    arithmetic = [Probe(m, (1000,), rounds=8) for m in (Measures.FUNCTION, Measures.ELEMENTWISE)]
    found = [(probe, 2.0, 0.0) for probe in (*once, *arithmetic)]
    calibration = Calibration("2026-11-28", jax.__version__, "H100", 0.0)
    rates = measured_device(hardware.device_type, found, 1.0, calibration).measured
    assert rates.function_per_s == pytest.approx(8 * 4 * 1000)
    assert rates.elementwise_per_s == pytest.approx(8 * 64 * 1000)


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("num_devices", [3, 6, 8])
def test_any_number_of_devices_divides_the_arrays_of_its_collectives(tmp_path, num_devices, quick):
    file = tmp_path / "cluster.yaml"
    text = (CLUSTERS / "h100x8.yaml").read_text()
    file.write_text(text.replace("devices_per_node: 8", f"devices_per_node: {num_devices}"))
    (hardware,) = Cluster.from_file(file).slices()
    made = [probe for probe in probes(hardware, ("float32",), quick) if probe.collective is not None]
    assert {probe.size for probe in made} >= {num_devices}
    for probe in made:
        if probe.measures is Measures.INNER:
            assert [n % probe.size for n in probe.shape] == [0, 0]
        else:
            assert probe.shape[0] % (4 * probe.size) == 0
