"""Side by side with the peers: `python -m benchmarks.peers [contest ...] --disk DIR`.

Each peer has an environment of its own, which the first run makes: `--setup` does only that. A job is a process. The
jobs of a contest run one after the other, and then again in the next round: ratios are of the same minutes. What a job
gives is kept in `build/peers/results`. A second run does what is missing, and `--again` does all of it. `--job` picks
some of the jobs. `--page` writes `docs/comparison.md` from what is there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.common import machine
from benchmarks.peers import page
from benchmarks.peers.contests import CONTESTS, JOBS, Contest, file_of, results_of
from benchmarks.peers.environments import ROOT, python_of


def do(name: str, contest: Contest, job: str, disk: str) -> dict[str, Any]:
    """One job in a process of its own. One that fails gives the last line that it wrote."""
    made, threads = JOBS[job], len(os.sched_getaffinity(0))
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=disk) as directory:
        task = {"variant": made.variant, "disk": directory, "threads": threads, **contest.task}
        command = [python_of(made.environment), "-m", f"benchmarks.peers.{made.module}", json.dumps(task)]
        words = {"OMP_NUM_THREADS": str(threads), "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false"}
        limit = contest.limit_seconds
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=limit, cwd=ROOT, env={**os.environ, **words}
            )
        except subprocess.TimeoutExpired:
            return {"error": f"did not end within {limit} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        print(done.stderr[-4000:], file=sys.stderr)
        return {"error": lines[-1] if lines else f"ended with {done.returncode}"}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return {**found, "whole": time.perf_counter() - began, "machine": machine(), "day": time.strftime("%Y-%m-%d")}


def run(name: str, wanted: list[str], disk: str, again: bool) -> None:
    contest = CONTESTS[name]
    for number in range(contest.rounds):
        for job in contest.jobs:
            file = file_of(name, job, number)
            if (wanted and job not in wanted) or (file.exists() and not again):
                continue
            found = do(name, contest, job, disk)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(found) + "\n")
            print(f"{name}, round {number}, {job}: {page.in_words(found)}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contests", nargs="*", metavar="contest", help=f"of {', '.join(CONTESTS)}")
    parser.add_argument("--disk", default=".", help="a directory on the drive to measure")
    parser.add_argument("--job", action="append", default=[], choices=list(JOBS), help="only this job; may be repeated")
    parser.add_argument("--again", action="store_true", help="do what was done before, too")
    parser.add_argument("--setup", action="store_true", help="make the environments of all peers")
    parser.add_argument("--page", action="store_true", help="write docs/comparison.md from the results")
    wanted = parser.parse_args()
    if unknown := sorted(set(wanted.contests) - set(CONTESTS)):
        parser.error(f"no such contest: {', '.join(unknown)}")
    if wanted.setup:
        for environment in sorted({job.environment for job in JOBS.values()}):
            python_of(environment)
    if wanted.contests:
        free = shutil.disk_usage(wanted.disk).free
        print(f"{machine()}; the largest exact bf16 model on this drive: {page.largest(free)}")
    for name in wanted.contests:
        run(name, wanted.job, wanted.disk, wanted.again)
        print(page.table_of(name, results_of(name)), flush=True)
    if wanted.page:
        page.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
