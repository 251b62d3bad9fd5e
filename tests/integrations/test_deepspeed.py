"""DeepSpeed's configurations: the oracles are transformers, which fills in "auto", and outsize's own presets."""

from __future__ import annotations

import copy
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import outsize
from outsize.integrations.deepspeed import config_from
from tests.conftest import Workshop, batches, train
from tests.small_models import Stack

AUTO: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 500, "hysteresis": 2},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}


def zero(stage: int, optimizer: str = "none", param: str = "none") -> dict[str, Any]:
    section: dict[str, Any] = {"stage": stage}
    for name, device in (("offload_optimizer", optimizer), ("offload_param", param)):
        section[name] = {"device": device, **({"nvme_path": "/nvme"} if device == "nvme" else {})}
    return {"zero_optimization": section}


@pytest.mark.parametrize(
    ("preset", "given"),
    [
        ("ddp", {}),
        ("zero-2", zero(2)),
        ("zero-3", zero(3)),
        ("zero-offload", zero(2, "cpu")),
        ("zero-infinity-cpu", zero(3, "cpu", "cpu")),
        ("zero-infinity-nvme", zero(3, "nvme", "nvme")),
    ],
)
def test_stages_and_offload_are_those_of_the_presets(preset: str, given: dict[str, Any]) -> None:
    fields = dict(config_from(given).fields)
    assert fields.pop("disk", None) == (["/nvme"] if "nvme" in preset else None)
    assert fields == outsize.presets[preset]


def filled_by_transformers(given: dict[str, Any], args: Any) -> dict[str, Any]:
    transformers = pytest.importorskip("transformers.integrations.deepspeed")
    accelerate = pytest.importorskip("accelerate.utils.deepspeed")
    theirs = vars(transformers.HfTrainerDeepSpeedConfig)
    names = ("fill_match", "fill_only", "trainer_config_process")
    config = type("Filled", (accelerate.HfDeepSpeedConfig,), {name: theirs[name] for name in names})(given)
    config.mismatches = []
    config.trainer_config_process(args)
    assert not config.mismatches
    found: dict[str, Any] = config.config
    return found


@pytest.mark.parametrize("precision", [{}, {"bf16": True}, {"fp16_full_eval": True}])
def test_auto_is_filled_in_as_transformers_does(precision: dict[str, Any], tmp_path: Path) -> None:
    args = pytest.importorskip("transformers").TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=3,
        learning_rate=2e-4,
        adam_beta2=0.95,
        adam_epsilon=1e-6,
        weight_decay=0.1,
        max_grad_norm=0.5,
        use_cpu=True,
        **precision,
    )
    filled = filled_by_transformers(copy.deepcopy(AUTO), args)
    assert "auto" not in str({key: value for key, value in filled.items() if key != "zero_optimization"})
    ours, theirs = config_from(AUTO, args), config_from(filled)
    assert content(ours) == content(theirs)
    assert (ours.max_grad_norm, ours.accumulation_steps, ours.micro_batch_size) == (0.5, 3, 4)
    model = Stack()
    optimizer = ours.optimizer(model.parameters())  # type: ignore[misc]
    group = optimizer.param_groups[0]
    assert type(optimizer) is torch.optim.AdamW
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (2e-4, (0.9, 0.95), 1e-6, 0.1)
    dtype = {"bf16": torch.bfloat16, "fp16_full_eval": torch.float16}.get(*precision) if precision else None
    assert ours.fields.get("compute_dtype") is dtype
    if dtype is torch.float16:
        scaler = ours.scaler("cpu")  # type: ignore[misc]
        assert (scaler.get_scale(), scaler.get_growth_interval()) == (2.0**12, 500)


def content(found: Any) -> list[Any]:
    """What can be compared of it."""
    calls = [each and (each.func, each.keywords) for each in (found.optimizer, found.scaler)]
    return [found.fields, found.max_grad_norm, found.accumulation_steps, found.micro_batch_size, calls]


def test_a_value_that_is_not_that_of_the_arguments_is_refused(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    args = transformers.TrainingArguments(str(tmp_path), max_grad_norm=0.5, use_cpu=True)
    with pytest.raises(ValueError, match=r"gradient_clipping: it is 1.0, and max_grad_norm .* is 0.5"):
        config_from({"gradient_clipping": 1.0}, args)


def test_all_that_has_no_counterpart_is_one_error() -> None:
    given = {
        **zero(2, "cpu", "cpu"),
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
        "amp": {"enabled": True, "opt_level": "O1"},
        "elasticity": {"enabled": True, "max_train_batch_size": 8},
        "flops_profiler": {"enabled": False, "top_modules": 1},
        "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}},
        "fp16": {"enabled": True, "loss_scale": 128},
        "gradient_clipping": "auto",
        "prescale_gradients": False,
        "train_batch_size": 7,
        "gradient_accumulation_steps": 2,
        "stpes_per_print": 10,
    }
    given["zero_optimization"] |= {"zero_hpz_partition_size": 8, "nonsense": 1}
    with pytest.raises(ValueError, match="cannot take over this DeepSpeed configuration") as caught:
        config_from(given)
    lines = dict(line[2:].split(": ", 1) for line in str(caught.value).splitlines()[1:])
    assert set(lines) == {
        *("zero_optimization.offload_param", "zero_optimization.zero_hpz_partition_size", "zero_optimization.nonsense"),
        *("scheduler", "amp", "elasticity", "optimizer.type", "fp16.loss_scale", "gradient_clipping"),
        *("train_batch_size", "stpes_per_print"),
    }
    assert (
        "torch.optim.lr_scheduler" in lines["scheduler"] and "use stage 3" in lines["zero_optimization.offload_param"]
    )
    assert "pass args=" in lines["gradient_clipping"]


def test_keys_have_the_names_and_places_of_published_files() -> None:
    given = {**zero(3, "nvme", "nvme"), "bfloat16": {"enabled": True}, "fp16": None}
    given["zero_optimization"] |= {
        "aio": {"block_size": 262144, "queue_depth": 32},  # where transformers' documentation has it
        "prefetch_bucket_size": 1e7,
        "gather_16bit_weights_on_model_save": True,
        "zero_quantized_weights": None,
    }
    given["optimizer"] = {"type": "Adam", "params": None}
    assert config_from(given).fields["compute_dtype"] is torch.bfloat16
    assert config_from({**given, "bf16": None}).fields["compute_dtype"] is torch.bfloat16


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"zero_optimization": True}, 'zero_optimization: it is True; name the stage: {"stage": 1}'),
        ({"fp16": {"enabled": True, "loss_scale_window": 9}, "bf16": {"enabled": True}}, "bf16.enabled: fp16.enabled"),
        ({"bf16": {"enabled": False}, "bfloat16": {"enabled": True}}, "bfloat16: it is the older name of bf16"),
        ({"train_micro_batch_size_per_gpu": 0, "train_batch_size": 8}, "it is 0; it must be a whole number"),
        ({"fp16": {"enabled": "auto", "initial_scale_power": 9, "loss_scale_window": 9}}, 'enabled: it is "auto"'),
        ({"communication_data_type": "int8"}, "communication_data_type: it is 'int8'; outsize knows"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "tape"}}}, "param.device: it is 'tape'"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "nvme_path: it is missing"),
    ],
)
def test_what_contradicts_or_is_no_value_is_one_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        config_from(given)
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize("stage", ["auto", "3", 5, True])
def test_a_stage_that_there_is_not_is_refused(stage: Any) -> None:
    given = {"zero_optimization": {"stage": stage, "offload_param": {"device": "cpu"}}}
    with pytest.raises(ValueError, match=f"zero_optimization.stage: it is {stage!r}; outsize knows 0, 1, 2 and 3$"):
        config_from(given)


@pytest.mark.parametrize(
    ("text", "what"), [('{"zero_optimization": {,}', "is no JSON: .*line 1"), ("[]", "holds a list")]
)
def test_a_file_that_is_no_configuration_is_named(tmp_path: Path, text: str, what: str) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=f"ds_config.json {what}"):
        config_from(file)


@pytest.mark.parametrize(
    ("section", "kind", "options"),
    [
        ({"type": "Adam", "params": {"lr": 0.1, "torch_adam": True}}, torch.optim.AdamW, {"lr": 0.1}),
        ({"type": "Adam", "params": {"adam_w_mode": False}}, torch.optim.Adam, {"weight_decay": 0.0}),
        ({"type": "AdamW"}, torch.optim.AdamW, {"weight_decay": 0.0}),
        ({"type": "Lion", "params": {"betas": [0.8, 0.9]}}, outsize.optim.Lion, {"lr": 1e-3, "betas": (0.8, 0.9)}),
        ({"type": "RMSprop", "params": {"alpha": 0.9}}, torch.optim.RMSprop, {"alpha": 0.9}),
    ],
)
def test_optimizer_is_the_one_of_the_name_with_deepspeeds_defaults(section: Any, kind: type, options: Any) -> None:
    found = config_from({"optimizer": section}).optimizer
    assert isinstance(found, partial)
    assert (found.func, found.keywords) == (kind, options)


def test_batches_follow_from_each_other() -> None:
    for given in (
        {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 4},
        {"train_batch_size": 24, "gradient_accumulation_steps": 6},
        {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 6},
    ):
        found = config_from(given)
        assert (found.micro_batch_size, found.accumulation_steps) == (4, 6)


def test_a_model_trains_by_the_file_as_plain_torch_does(workshop: Workshop, tmp_path: Path) -> None:
    given = {**zero(3, "nvme", "nvme"), "gradient_clipping": 0.5, "optimizer": {"type": "Adam", "params": {"lr": 0.01}}}
    given["zero_optimization"]["offload_param"]["nvme_path"] = str(workshop.disk)
    given["zero_optimization"]["offload_optimizer"]["nvme_path"] = str(workshop.disk)
    (tmp_path / "ds_config.json").write_text(json.dumps(given))
    found = config_from(tmp_path / "ds_config.json")
    torch.manual_seed(0)
    plain = Stack()
    model = copy.deepcopy(plain)
    optimizer = found.optimizer(model.parameters())  # type: ignore[misc]
    outsize.prepare(model, optimizer, device=workshop.device, host_memory="64MiB", **found.fields)
    workshop.watch(model)
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0), batches(3), clip=0.5)
    train(model, optimizer, batches(3), clip=found.max_grad_norm).close_to(expected)
    assert outsize.memory(model).now["disk/states"] > 0
