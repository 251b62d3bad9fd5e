"""Train the stages of a pipeline whose weights and optimizer state rest on disk.

    torchrun --nproc-per-node 4 examples/pipeline.py DIRECTORY [--stages 2] [--steps 20] [--micro-batches 8]

Four processes with two stages: each stage is on two ranks, which share its state and have half of a batch each. The
directory is shared by all. Start it again, with other numbers of processes and of stages if you like: it goes on from
the last checkpoint, which knows nothing of stages. One process is one stage.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import outsize

WIDTH, LAYERS, ROWS = 256, 8, 32


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """The whole model, or a stage of it: some of its layers, under the names that they have in the whole model."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__()
        layers = {str(number): Layer() for number in range(LAYERS)}
        self.layers = nn.ModuleDict({name: layers[name] for name in layers if int(name) * stages // LAYERS == stage})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def main(directory: Path, stages: int, steps: int, micro_batches: int) -> float | None:
    """Returns the last loss, on ranks that have the last stage."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (stages, dist.get_world_size() // stages), mesh_dim_names=("pp", "dp"))
    stage, part = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    first, last = stage == 0, stage == stages - 1

    torch.manual_seed(0)  # the same model on every rank
    model = Net(stage, stages)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    disk = directory / "disk"
    disk.mkdir(parents=True, exist_ok=True)
    places = {"params": "disk", "grads": "disk", "states": "disk"}
    outsize.prepare(model, optimizer, device="cpu", host_memory="16MiB", disk=disk, mesh=mesh, **places)
    pipe = PipelineStage(model, stage, stages, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(pipe, n_microbatches=micro_batches, loss_fn=nn.functional.mse_loss)

    step, loss = 0, None
    if any((directory / "checkpoints").glob("step-*")):
        step = outsize.load(directory / "checkpoints", model, optimizer)["step"]
    while step < steps:
        rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)).chunk(mesh["dp"].size())[part]
        losses: list[Tensor] = []
        schedule.step(*([rows] if first else []), **({"target": rows.flip(1), "losses": losses} if last else {}))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # over all stages
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if last:
            loss = torch.stack(losses).mean().item()
            if part == 0:
                print(f"step {step}: loss {loss:.4f}, gradient norm {norm:.3f}", flush=True)
        if step % 10 == 0 or step == steps:
            outsize.save(directory / "checkpoints" / f"step-{step}", model, optimizer, {"step": step}, keep=2)
    if part == 0:
        moved = outsize.memory(model)
        read, written = moved.bytes_read / 2**20, moved.bytes_written / 2**20
        print(f"stage {stage}: {read:.0f} MiB read from disk, {written:.0f} MiB written", flush=True)
    return loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--micro-batches", type=int, default=8)
    options = parser.parse_args()
    main(options.directory, options.stages, options.steps, options.micro_batches)
    dist.destroy_process_group()
