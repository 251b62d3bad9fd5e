"""`docs/comparison.md` is made from the results of `benchmarks.peers`, without the peers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.peers import contests, page
from benchmarks.peers.contests import QUICK
from benchmarks.peers.environments import OURS, REQUIREMENTS


def result(seconds: float, rss: float, losses: tuple[float, ...] = (8.0, 7.0)) -> dict[str, Any]:
    moved = {"read": 2e9, "written": 1e9, "parameters": 162_000_000, "peak": 2**30}
    return {"seconds": seconds, "rss": rss, "losses": losses, "machine": "a machine", "day": "2026-11-26", **moved}


def keep(results: Path, contest: str, job: str, *rounds: dict[str, Any]) -> None:
    for number, each in enumerate(rounds):
        file = contests.file_of(contest, job, number, results)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(each))


def test_the_page_has_ratios_of_the_same_round_and_the_words_of_a_peer_that_refuses(tmp_path: Path) -> None:
    keep(tmp_path, "disk", "outsize, disk", result(2.0, 0.5e9), result(4.0, 0.5e9))
    keep(tmp_path, "disk", "DeepSpeed, NVMe", result(4.0, 2e9, (8.0, 7.7)), result(12.0, 2e9))
    keep(tmp_path, "host", "outsize, host", result(2.0, 2e9))
    keep(tmp_path, "host", "FSDP2, CPU offload", result(2.0, 3e9))
    keep(tmp_path, "host", "torchao, CPUOffloadOptimizer", {"error": "needs CUDA"})
    keep(tmp_path, "size-1", "outsize, disk", result(81.0, 1e9) | {"predicted": 162.0})
    text = page.text(tmp_path)
    precision = "bf16 with fp32 masters" if QUICK == "bfloat16" else "fp32"
    assert f"| outsize, disk | 3.00 | 1.00 | 0.50 | 1.00 | 2.00 | 1.00 | 0.0e+00 | {precision} |" in text
    assert "| DeepSpeed, NVMe | 8.00 | 2.50 | 2.00 | 4.00 |" in text
    assert "1.0e-01" in text
    assert "step time over DeepSpeed, NVMe | 0.40 x | <= 0.4 x | yes |" in text
    assert "memory beyond imports over DeepSpeed, NVMe | 0.25 x | <= 0.15 x | no |" in text
    assert "| torchao, CPUOffloadOptimizer | needs CUDA |" in text
    assert "162.0 (+100%) | 1.00 | 18.5 | 8.000 > 7.000 |" in text
    assert "a machine, 2026-11-26" in text


def test_every_contest_names_jobs_and_versions_that_are_there() -> None:
    for contest in contests.CONTESTS.values():
        for job in map(contests.JOBS.__getitem__, contest.jobs):
            assert Path(contests.__file__).with_name(f"{job.module}.py").exists()
            assert job.environment == OURS or (REQUIREMENTS / f"{job.environment}.txt").exists()
