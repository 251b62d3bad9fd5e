"""TRL's trainers on models at rest on disk, as in the example. TRL without outsize is the oracle."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from outsize.integrations.transformers import Trainer
from tests.ranks.launching import run_on_ranks
from tests.test_examples import example

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")
datasets = pytest.importorskip("datasets")

STEPS = 4
ON_DISK = {"params": "disk", "grads": "disk", "states": "disk", "host_memory": "16MiB", "activations": "keep"}

pytestmark = [  # of TRL's own code
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(autouse=True)
def nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def logged(checkpoint: Path) -> list[float]:
    """The losses of the run that left it."""
    log = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in log if "loss" in entry]


def test_the_example_trains_as_trl_does_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    script = example("with_trl")
    assert script.main(tmp_path, STEPS).startswith("3 + 4 =")
    sft = script.supervised(tmp_path / "base", tmp_path / "plain", STEPS, trl.SFTTrainer)
    assert logged(tmp_path / "sft" / f"checkpoint-{STEPS}") == pytest.approx(losses(sft), rel=1e-5)
    tuned, whole = tmp_path / "tuned", logged(tmp_path / "dpo" / f"checkpoint-{STEPS // 2}")
    dpo = script.preferred(tuned, tmp_path / "plain", STEPS // 2, trl.DPOTrainer)
    assert whole == pytest.approx(losses(dpo), rel=1e-5)
    budgets, first = {**ON_DISK, "disk": tmp_path / "state"}, tmp_path / "dpo" / "checkpoint-1"
    assert losses(script.preferred(tuned, tmp_path / "again", STEPS // 2, resume=first, **budgets)) == whole


def test_adapters_train_as_with_trl(tmp_path: Path) -> None:
    script = example("with_trl")
    script.make_base(tmp_path)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
    budgets = {**ON_DISK, "disk": tmp_path / "state"}
    for train, kind in ((script.supervised, trl.SFTTrainer), (script.preferred, trl.DPOTrainer)):
        torch.manual_seed(0)  # older trainers make the adapters before they set a seed
        plain = train(tmp_path, tmp_path / "plain", STEPS, kind, config)
        torch.manual_seed(0)
        ours = train(tmp_path, tmp_path / "ours", STEPS, peft=config, **budgets)
        assert losses(ours) == pytest.approx(losses(plain), rel=1e-5)


def scored(completions: list[str], **_: Any) -> list[float]:
    """A reward that differs within a group."""
    return [len(set(each)) + index / 10 for index, each in enumerate(completions)]


SUMS = [f"{a} + {a} =" for a in range(8)]
ANSWERED = {"prompt": SUMS, "completion": [f" {2 * a}" for a in range(8)]}
GROUPS = {"num_generations": 4, "max_completion_length": 4}
OTHERS = {
    "GRPO": (GROUPS | {"beta": 0.1}, {"reward_funcs": scored}, {"prompt": SUMS}),
    "RLOO": (GROUPS, {"reward_funcs": scored}, {"prompt": SUMS}),
    "KTO": ({}, {}, {**ANSWERED, "label": [True, False] * 4}),
    "Reward": ({}, {}, {"chosen": [f"{each} 3" for each in SUMS], "rejected": [f"{each} 9" for each in SUMS]}),
}
"""Arguments, keywords and data of TRL's trainers that the example leaves out."""


@pytest.mark.parametrize("name", OTHERS)
def test_other_trainers_train_as_with_trl(name: str, tmp_path: Path) -> None:
    script, (fields, keywords, columns) = example("with_trl"), OTHERS[name]
    script.make_base(tmp_path)
    kind, config = getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config")
    arguments = script.arguments(STEPS, 1e-3) | {"per_device_train_batch_size": 4, "seed": 3} | fields
    found = []
    for kinds, budgets in (((kind,), {}), ((Trainer, kind), {**ON_DISK, "disk": tmp_path / "state"})):
        trainer = type("Mine", kinds, {})(
            model=str(tmp_path),
            args=config(str(tmp_path / str(len(found))), **arguments),
            train_dataset=datasets.Dataset.from_dict(columns),
            processing_class=transformers.AutoTokenizer.from_pretrained(tmp_path),
            **keywords,
            **budgets,
        )
        trainer.train()
        found.append(
            [
                value
                for entry in trainer.state.log_history
                if "loss" in entry
                for value in (entry["loss"], entry["grad_norm"])
            ]
        )
    assert len(found[1]) == 2 * STEPS
    assert found[1] == pytest.approx(found[0], rel=1e-5, abs=1e-6)


def rank_of_two(folder: Path) -> list[tuple[list[float], list[float]]]:
    """Losses with outsize, and with TRL alone, which takes DistributedDataParallel."""
    rank = str(torch.distributed.get_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2")
    script, budgets = example("with_trl"), {**ON_DISK, "disk": folder / "state"}
    return [
        (losses(train(folder, folder / "ours", STEPS, **budgets)), losses(train(folder, folder / "plain", STEPS, kind)))
        for train, kind in ((script.supervised, trl.SFTTrainer), (script.preferred, trl.DPOTrainer))
    ]


def test_two_ranks_train_as_with_trl(tmp_path: Path) -> None:
    example("with_trl").make_base(tmp_path)
    for shown in run_on_ranks(2, rank_of_two, tmp_path):
        for ours, plain in shown:
            assert len(ours) == STEPS
            assert ours == pytest.approx(plain, rel=1e-5)
