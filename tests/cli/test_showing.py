"""Schedule, metrics, display and report, from figures made up here."""

import io
import math
from itertools import pairwise
from pathlib import Path

import pytest

from outsize.cli import display, metrics, probe, report
from outsize.cli.metrics import Counters, Record
from outsize.cli.schedule import FLOOR, Schedule


def record(step: int, **changes: object) -> Record:
    fields: dict[str, object] = {
        "step": step,
        "elapsed_seconds": 4.0 * step,
        "loss": 9.0 - 3 * math.tanh(step / 30),
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens": 512,
        "step_seconds": 4.0,
        "wait_seconds": 1.0,
        "update_seconds": 2.0,
        "bytes_read": 2_400_000_000,
        "bytes_written": 1_900_000_000,
        "total_read": 2_400_000_000 * step,
        "total_written": 1_900_000_000 * step,
        "rss_bytes": 1_000_000_000,
        "base_rss_bytes": 600_000_000,
        "state_bytes": 1_910_000_000,
    }
    return Record(**{**fields, **changes})  # type: ignore[arg-type]


def test_schedule_warms_up_linearly_then_falls_to_its_floor() -> None:
    schedule = Schedule(1.0, 9, 1000)
    rates = [schedule.lr(step, 0.0) for step in range(1001)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[4] == pytest.approx(0.5, rel=1e-3)
    assert rates[500] == pytest.approx(FLOOR + (1 - FLOOR) / 2)
    assert rates[1000] == pytest.approx(FLOOR)
    assert all(later <= earlier for earlier, later in pairwise(rates[10:]))


def test_schedule_follows_time_when_time_is_nearer_to_its_end() -> None:
    schedule = Schedule(1.0, 0, 1000, seconds=100.0)
    assert schedule.lr(10, 50.0) == pytest.approx(FLOOR + (1 - FLOOR) / 2)
    assert schedule.over(10, 100.0)
    assert not schedule.over(10, 99.0)
    assert schedule.over(1000, 0.0)


def test_schedule_without_a_time_limit_ignores_the_clock() -> None:
    schedule = Schedule(1.0, 5, 100)
    assert schedule.lr(40, 0.0) == schedule.lr(40, 1e9)


def test_counters_of_a_step_are_a_difference() -> None:
    before = Counters(1.0, 2.0, 300, 400)
    assert Counters(1.5, 4.0, 350, 410).since(before) == Counters(0.5, 2.0, 50, 10)


def test_records_survive_the_file_and_a_line_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2, 3):
        metrics.append(path, record(step, memory={"disk/states": 5}))
    with path.open("a") as file:
        file.write('{"step": 4, "lo')
    assert metrics.read(path) == [record(step, memory={"disk/states": 5}) for step in (1, 2, 3)]
    metrics.keep_until(path, 2)
    assert [kept.step for kept in metrics.read(path)] == [1, 2]


def test_line_says_all_that_the_panel_says() -> None:
    line = display.line(record(3, held_out_loss=7.125), 150)
    for part in (
        "step 3/150 0:12",
        "held-out 7.125",
        "128 tokens/s",
        "4.00 s: compute 3.00 + wait for disk 1.00, update 2.00 behind",
        "2.4 GB read 1.9 GB written",
        "(total 7.2 GB, 5.7 GB)",
        "RSS 400 MB over imports, state 1.91 GB",
    ):
        assert part in line
    panel = dict(display.panel_rows(record(3), (2, 7.5)))
    assert "held-out 7.500 at step 2" in panel["loss"]
    assert panel["state"] == "1.91 GB, 4.8 x the memory used"
    assert dict(display.panel_rows(record(3, state_bytes=3_150_000), None))["state"] == "3.15 MB"


def test_plain_lines_are_few_but_keep_held_out_losses(capsys: pytest.CaptureFixture[str]) -> None:
    with display.LineDisplay(50, every_seconds=3600) as lines:
        for step in range(1, 50):
            lines.show(record(step, held_out_loss=6.5 if step == 20 else None))
        lines.show(record(50))
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in out] == ["1/50", "20/50", "50/50"]


def test_last_plain_line_is_that_of_the_last_step(capsys: pytest.CaptureFixture[str]) -> None:
    with display.LineDisplay(50, every_seconds=3600) as lines:
        for step in range(1, 8):
            lines.show(record(step))
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in out] == ["1/50", "7/50"]


def test_live_panel_draws_a_record() -> None:
    from rich.console import Console

    live = display.LiveDisplay(150, 480.0)
    console = Console(width=110, record=True, quiet=False, file=io.StringIO())
    console.print(live._panel(record(30)))
    assert "step 30 of at most 150 · 2:00 of 8:00" in console.export_text()


def test_sparkline_leaves_out_what_is_not_finite() -> None:
    assert display.sparkline([1.0, float("nan"), 2.0]) == "▁█"
    assert display.sparkline([]) == ""


@pytest.mark.slow
def test_report_is_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "run" / "report.png"
    records = [record(step, held_out_loss=7.0 if step == 50 else None) for step in range(1, 101)]
    report.write(path, records, [(0, 9.1), (100, 6.0)], peak_rss=1_100_000_000)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_report_of_one_step_with_no_traffic_is_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "report.png"
    report.write(path, [record(1, bytes_read=0, bytes_written=0, rss_bytes=0)], [])
    assert path.exists()


def test_report_without_a_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no step"):
        report.write(tmp_path / "report.png", [], [])


def test_smoothing_starts_at_the_first_value() -> None:
    assert report.smooth([4.0, 4.0, 4.0]) == pytest.approx([4.0, 4.0, 4.0])
    assert report.smooth([4.0, 2.0])[0] == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1430, "1.43 kB"), (2.5e8, "250 MB"), (5e15, "5000 TB")]
)
def test_sizes_have_three_figures(count: float, text: str) -> None:
    assert metrics.human(count) == text


def test_probe_measures_and_leaves_nothing(tmp_path: Path) -> None:
    rates = probe.measure(tmp_path, 16 << 20)
    assert min(rates.disk_read, rates.disk_write, rates.memory, rates.flops) > 0
    assert "GB/s" in probe.describe(rates)
    assert not any(tmp_path.iterdir())


def test_skipped_steps_are_shown() -> None:
    skipped = record(4, skipped_steps=3)
    assert "(3 steps skipped)" in display.line(skipped, 10)
    assert any("3 steps skipped" in text for _, text in display.panel_rows(skipped, None))
    assert "skipped" not in display.line(record(4), 10)
