"""`refit-transport bench --gpu`: its refusal without a GPU, and its measuring on the CPU, where it is exact too."""

import io
import json

import pytest
import torch
from typer.testing import CliRunner

from refit_transport import cli_bench
from refit_transport.bench import gpu
from refit_transport.bench.gpu import GpuResult, PackCase, Rate, copy_peak, measure_packing, render_gpu
from refit_transport.cli import app

CPU = torch.device("cpu")


def test_without_a_gpu_it_says_what_is_missing(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    result = CliRunner().invoke(app, ["bench", "--gpu", "--output", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "needs a CUDA device" in result.stderr
    assert "needs a torch with NCCL" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "case",
    [
        PackCase("plain", (32, 24), 3, bucket_bytes=128),
        PackCase("narrower", (32, 24), 3, source_dtype="float32", bucket_bytes=128),
        PackCase("small", (4, 12), 50, bucket_bytes=256),
    ],
)
def test_packing_is_measured_and_compared(case):
    pack, unpack = measure_packing(case, CPU, peak=1e9)
    # Two bytes an element: rank 0 packs its half, the middle target unpacks its third.
    whole = case.tensors * case.shape[0] * case.shape[1] * 2
    assert (pack.direction, unpack.direction) == ("pack", "unpack")
    assert (pack.nbytes, unpack.nbytes) == (whole // 2, whole // 3)
    assert pack.is_exact
    assert unpack.is_exact
    assert pack.share == pytest.approx(pack.nbytes / pack.seconds / 1e9)


def test_other_bytes_are_seen(monkeypatch):
    """One side's weights differ in one element."""
    made = gpu._program

    def spoiled(schedule, manifest, sizes, device):
        program = made(schedule, manifest, sizes, device)
        if not spoiled.is_done:
            spoiled.is_done = True
            step = next(step for step in program.steps if step.pack.into)
            step.pack.out_of[0][-1, -1] += 1
        return program

    spoiled.is_done = False
    monkeypatch.setattr(gpu, "_program", spoiled)
    pack, _ = measure_packing(PackCase("plain", (32, 24), 3, bucket_bytes=128), CPU, peak=1e9)
    assert not pack.is_exact


def test_the_copy_peak_is_a_rate():
    assert 1e6 < copy_peak(CPU, nbytes=1 << 20) < 1e13


def result(*, exact):
    return GpuResult("a GPU", 2e12, (Rate("plain", "pack", 10**9, 1e-3, 0.5, exact),), 0.25, exact)


def test_its_output_and_exit_code(tmp_path, monkeypatch):
    monkeypatch.setattr(cli_bench, "check_gpu", lambda: None)
    for exact, code in ((True, 0), (False, 1)):
        monkeypatch.setattr(cli_bench, "measure_gpu", lambda *, announce, exact=exact: result(exact=exact))
        run = CliRunner().invoke(app, ["bench", "--gpu", "--output", str(tmp_path), "--json"])
        assert run.exit_code == code
        written = json.loads((tmp_path / "gpu.json").read_text())
        assert written == json.loads(run.stdout)["gpu"]
        assert len(written["misses"]) == 2 * (not exact)
        assert ("WRONG" in (tmp_path / "gpu.txt").read_text()) is not exact


def test_the_table_shows_rate_and_share():
    from rich.console import Console

    console = Console(width=120, record=True, file=io.StringIO())
    console.print(render_gpu(result(exact=True)))
    text = console.export_text()
    for part in ("copy peak 2000 GB/s", "1000", "50%", "equal", "refit to itself: exact"):
        assert part in text
