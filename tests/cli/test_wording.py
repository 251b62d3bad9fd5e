"""What the command line says of a mistake, it says in its own options."""

import pytest

from outsize.cli.wording import in_options


@pytest.mark.parametrize(
    ("python", "options"),
    [
        ("params='disk' needs a directory: pass disk='/path'", "--params disk needs a directory: pass --disk /path"),
        (
            "do not fit host_memory=1.0 GiB and no disk is given; pass disk='/path' or raise host_memory",
            "do not fit --host-memory 1.0 GiB and no disk is given; pass --disk /path or raise --host-memory",
        ),
        ("free some, or raise disk_space", "free some, or raise --disk-space"),
        ("raise host_memory or let grads be 'auto'", "raise --host-memory or use --grads auto"),
        ("use stage=3, where each rank keeps a part", "use --stage 3, where each rank keeps a part"),
        ("device is 'tpu'; use 'cpu'", "--device is 'tpu'; use 'cpu'"),
        ("host_memory is '1 apple', which is not a size", "--host-memory is '1 apple', which is not a size"),
        (
            "the checkpoint c is of another model: weight 'a.b' is missing; 'c' is new. Load it into the model that "
            "was saved or pass strict=False. Nothing was changed",
            "the checkpoint c is of another model; give the --model that it was saved with. Nothing was changed",
        ),
        (
            "the checkpoint c is of another model: 1 buffers of another shape: a is 3 there and 1 here. Load it into "
            "the model that was saved. Some buffers get their shape in a forward: run one before load. Nothing was "
            "changed",
            "the checkpoint c is of another model; give the --model that it was saved with. Nothing was changed",
        ),
        ("/data/host_memory/a: the disk is full", "/data/host_memory/a: the disk is full"),
        ("--host-memory is right already", "--host-memory is right already"),
        ("cluster 'a.toml': host_memory is missing", "cluster 'a.toml': host_memory is missing"),
    ],
)
def test_messages_name_options(python: str, options: str) -> None:
    assert in_options(python) == options
