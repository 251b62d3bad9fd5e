"""What data, tensor and pipeline parallelism cost a rank beside its memory: bytes sent, and time spent idle."""

from __future__ import annotations

from dataclasses import dataclass

from outsize.planning.sizes import format_bytes

EXAMPLE_MICRO_BATCHES = 8


@dataclass(frozen=True)
class Parallel:
    """A rank among `copies` x `data` data-parallel ones, `tensor` tensor-parallel ones and `stages` of a pipeline."""

    data: int = 1
    copies: int = 1
    tensor: int = 1
    stages: int = 1
    stage: int = 0
    """Of this rank, from 0 on: the one with most parameters."""
    layers: int = 0
    """Of this stage; 0 where the model was not cut."""
    sent_bytes: int = 0
    """At most, in a step: gradients, and weights that are gathered, by the volumes of ring algorithms (ZeRO,
    Rajbhandari et al. 2020, section 7)."""
    token_bytes: int = 0
    """For each token of a batch: activations and their gradients, to the next stages and within tensor parallelism (two
    sums a layer and direction; Megatron-LM, Shoeybi et al. 2019, section 3)."""

    @property
    def ranks(self) -> int:
        return self.copies * self.data * self.tensor * self.stages

    def bubble(self, micro_batches: int, stages_a_rank: int = 1) -> float:
        """The part of a step in which a rank waits for other stages under GPipe and 1F1B, or their interleaved forms
        with several stages a rank (Narayanan et al. 2021, section 2.2)."""
        if micro_batches < 1 or stages_a_rank < 1:
            raise ValueError(f"{micro_batches} micro-batches and {stages_a_rank} stages a rank; both are at least 1")
        idle = (self.stages - 1) / stages_a_rank
        return idle / (micro_batches + idle)

    def lines(self) -> list[str]:
        shape = f"{self.copies * self.data} data x {self.tensor} tensor x {self.stages} stages"
        found = [f"{self.ranks:,} ranks: {shape}; a rank sends at most {format_bytes(self.sent_bytes)} a step for data"]
        if self.token_bytes:
            found.append(f"and {format_bytes(self.token_bytes)} for each token of its batch for tensors and stages")
        if self.stages > 1:
            idle = self.bubble(EXAMPLE_MICRO_BATCHES)
            found.append(
                f"this is stage {self.stage} of {self.stages}, the largest one, with {self.layers} layers; with "
                f"{EXAMPLE_MICRO_BATCHES} micro-batches a rank waits {idle:.0%} of a step for other stages"
            )
        return found


def sent_in_a_step(params: int, grads: int, stage: int, data: int, copies: int) -> int:
    """Bytes that a rank sends at most; `params` and `grads`: bytes of the whole ones that the ranks share."""
    part = (data - 1) / data
    moved = {0: 2 * grads, 1: grads + params, 2: grads + params, 3: grads + 2 * params}[stage] * part
    slice_of = grads if stage == 0 else grads / data
    return round(moved + 2 * (copies - 1) / copies * slice_of)


def sent_for_a_token(width: int, itemsize: int, layers: int, tensor: int, stages: int) -> int:
    """Bytes that a rank sends for each token; `width`: elements of a token between two layers."""
    sums = 4 * layers * 2 * (tensor - 1) / tensor
    return round(width * itemsize * (sums + min(stages - 1, 2)))
