"""The learning rate over a run that is bounded by steps and by time: warm-up, then half a cosine."""

import math
from dataclasses import dataclass

FLOOR = 0.1  # the last learning rate, as a part of the peak


@dataclass(frozen=True)
class Schedule:
    """`seconds` bounds the run as well as `steps` when it is not None; the one that is nearer to its end counts."""

    peak_lr: float
    warmup_steps: int
    steps: int
    seconds: float | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.peak_lr) or self.peak_lr <= 0:
            raise ValueError(f"--lr is {self.peak_lr}; it must be a positive number")
        if self.steps < 1:
            raise ValueError(f"--steps is {self.steps}; it must be at least 1")
        if self.warmup_steps < 0:
            raise ValueError(f"--warmup is {self.warmup_steps}; it must be 0 or more")

    def progress(self, step: int, elapsed_seconds: float) -> float:
        """0 at the start, 1 at the end: of the steps or of the time, whichever is further."""
        by_steps = step / self.steps
        by_time = elapsed_seconds / self.seconds if self.seconds else 0.0
        return min(1.0, max(by_steps, by_time))

    def over(self, step: int, elapsed_seconds: float) -> bool:
        return self.progress(step, elapsed_seconds) >= 1.0

    def lr(self, step: int, elapsed_seconds: float) -> float:
        """Learning rate of step `step`, counted from 0."""
        cosine = 0.5 * (1 + math.cos(math.pi * self.progress(step, elapsed_seconds)))
        warm = min(1.0, (step + 1) / (self.warmup_steps + 1))
        return self.peak_lr * warm * (FLOOR + (1 - FLOOR) * cosine)
