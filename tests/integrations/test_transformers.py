"""transformers' Trainer on a model at rest on disk. The plain Trainer beside it is the oracle."""

import copy
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import outsize
from outsize.api.assemble import require
from tests.comparing import assert_same_weights, weights
from tests.ranks.launching import in_turn, run_on_ranks
from tests.small_models import llama_config

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
tokenizers = pytest.importorskip("tokenizers")
safetensors = pytest.importorskip("safetensors.torch")

from outsize.integrations.accelerate import STATE  # noqa: E402
from outsize.integrations.transformers import Trainer, last_checkpoint  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),  # which PEFT asks for
]

ROWS, LENGTH, VOCABULARY = 32, 10, 64
ON_DISK = {"params": "disk", "grads": "disk", "states": "disk", "host_memory": "8MiB", "activations": "keep"}


def language_model(seed: int = 0, dropout: float = 0.1) -> Any:
    torch.manual_seed(seed)
    config = llama_config(32, 48, 2, 2, VOCABULARY, attention_dropout=dropout)
    return transformers.LlamaForCausalLM(config)


def adapted(seed: int = 0, dora: bool = False, dropout: float = 0.1) -> Any:
    peft = pytest.importorskip("peft")
    model = language_model(0, dropout)
    torch.manual_seed(seed)
    modules = ["q_proj", "up_proj", *(["embed_tokens"] if dora else [])]  # which PEFT saves with the adapters
    config = peft.LoraConfig(r=4, target_modules=modules, use_dora=dora, lora_dropout=dropout, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


def rows(seed: int = 0, count: int = ROWS) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(0, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in tokens]


def arguments(folder: Path, **changes: Any) -> Any:
    fields = {
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
    }
    if "activation_checkpointing" in changes and not hasattr(
        transformers.TrainingArguments, "activation_checkpointing"
    ):
        changes = {"gradient_checkpointing": changes["activation_checkpointing"]}  # before 5.21
    return transformers.TrainingArguments(str(folder), **{**fields, **changes})


def losses(trainer: Any, name: str = "loss") -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


@pytest.fixture
def disk(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "disk").mkdir()
    return {**ON_DISK, "disk": tmp_path / "disk"}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"max_grad_norm": 0.05},
        {"max_grad_norm": 0},
        {"bf16": True},
        {"optim": "sgd", "lr_scheduler_type": "cosine"},
        {"activation_checkpointing": True},
        {"label_smoothing_factor": 0.1},
        {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True},
    ],
    ids=lambda changes: ",".join(changes) or "plain",
)
def test_trains_like_the_plain_trainer(changes: dict[str, Any], disk: dict[str, Any], tmp_path: Path) -> None:
    model = language_model()
    data = {"train_dataset": rows(), "eval_dataset": rows(1, 8)}
    plain = transformers.Trainer(copy.deepcopy(model), arguments(tmp_path / "plain", **changes), **data)
    plain.train()
    ours = Trainer(model, arguments(tmp_path / "ours", **changes), **data, **disk)
    ours.train()
    for name in ("loss", "eval_loss", "grad_norm", "learning_rate"):
        assert losses(ours, name) == pytest.approx(losses(plain, name), rel=1e-5, abs=1e-9)
    assert len(losses(ours)) == 6
    assert_same_weights(model, plain.model)
    assert ours.predict(rows(2, 5)).predictions == pytest.approx(plain.predict(rows(2, 5)).predictions, abs=1e-4)


def test_a_prepared_model_trains_with_its_own_optimizer_and_scheduler(disk: dict[str, Any], tmp_path: Path) -> None:
    def train(model: Any, kind: Callable[..., Any], prepare: bool) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        if prepare:
            outsize.prepare(model, optimizer, **disk)
        trainer = kind(model, arguments(tmp_path), train_dataset=rows(), optimizers=(optimizer, scheduler))
        trainer.train()
        return trainer

    model = language_model()
    plain = train(copy.deepcopy(model), transformers.Trainer, prepare=False)
    ours = train(model, Trainer, prepare=True)
    assert losses(ours) == pytest.approx(losses(plain), rel=1e-5)
    assert losses(ours, "learning_rate") == losses(plain, "learning_rate")


@pytest.mark.parametrize("changes", [{}, {"gradient_accumulation_steps": 2, "gradient_checkpointing": True}], ids=str)
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated")
def test_a_prepared_model_trains_and_goes_on_in_the_plain_trainer(
    changes: dict[str, Any], disk: dict[str, Any], tmp_path: Path
) -> None:
    fields = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "save_total_limit": 2,
        "load_best_model_at_end": True,
        "max_grad_norm": 0.3,
        "learning_rate": 0.1,
        **changes,
    }

    def train(folder: str, seed: int = 0, resume: str | None = None, **budgets: Any) -> Any:
        model = language_model(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        if budgets:
            outsize.prepare(model, optimizer, **budgets)
        given = {"train_dataset": rows(), "eval_dataset": rows(1, 8), "optimizers": (optimizer, scheduler)}
        trainer = transformers.Trainer(model, arguments(tmp_path / folder, **fields), **given)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    plain, ours = train("plain"), train("ours", **disk)
    for name in ("loss", "grad_norm", "eval_loss"):
        assert losses(ours, name) == pytest.approx(losses(plain, name), rel=1e-5)
    best, every = ours.state.best_model_checkpoint, sorted(path.name for path in (tmp_path / "ours").iterdir())
    assert every == sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert Path(best).name == Path(plain.state.best_model_checkpoint).name
    assert_same_weights(ours.model, plain.model)  # the best
    opened = transformers.AutoModelForCausalLM.from_pretrained(best)
    assert all(torch.equal(opened.get_parameter(name), value) for name, value in weights(ours.model).items())
    prompt = torch.tensor([[1, 2, 3]])
    assert torch.equal(ours.model.generate(prompt, max_new_tokens=4), opened.generate(prompt, max_new_tokens=4))
    again = train("ours", 1, str(min((tmp_path / "ours").iterdir())), **disk)
    assert losses(again) == losses(ours)
    assert losses(again, "eval_loss") == losses(ours, "eval_loss")


def test_the_log_of_a_step_has_what_it_took_and_nothing_between_steps(disk: dict[str, Any], tmp_path: Path) -> None:
    model = language_model()
    reported = []

    class Report(transformers.TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
            reported.append(dict(logs))

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            with outsize.gathered(model, modify=True):
                pass  # writes all parameters
            self.on_step_end(args, state, control)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            require(model).engine.streamer.settle_all()
            for unit in require(model).engine.parameters.units:
                unit.await_written()

    trainer = Trainer(model, arguments(tmp_path, logging_steps=2), train_dataset=rows(), callbacks=[Report()], **disk)
    trainer.train()
    logged, whole = [entry for entry in reported if "loss" in entry], outsize.memory(model)
    assert [entry["step"] for entry in logged] == [2, 4, 6]
    for entry in logged:
        assert entry["bytes_written"] == entry["disk_bytes"] == whole.bytes_on("disk"), "each array once"
        assert entry["state_bytes"] == whole.state_bytes
        assert entry["skipped_steps"] == 0
    assert all(set(logged[0]) <= set(entry) for entry in trainer.state.log_history if "loss" in entry)


def test_a_model_built_at_rest_trains_within_the_budget(disk: dict[str, Any], tmp_path: Path) -> None:
    with outsize.init(**disk):
        model = language_model()
    trainer = Trainer(model, arguments(tmp_path), train_dataset=rows(), **disk)
    trainer.train()
    memory = outsize.memory(model)
    assert losses(trainer)[-1] < losses(trainer)[0]
    assert memory.now["disk/states"] > 0
    assert sum(size for name, size in memory.peak.items() if not name.startswith("disk")) <= 8 << 20


@pytest.mark.parametrize(
    ("tier", "changes"),
    [("host", {}), ("disk", {"gradient_accumulation_steps": 3, "bf16": True})],
    ids=["host-plain", "disk-accumulated"],
)
def test_resumed_training_is_bit_for_bit_the_same(
    tier: str, changes: Any, disk: dict[str, Any], tmp_path: Path
) -> None:
    budgets = {**disk, "params": tier, "grads": tier, "states": tier}

    def trainer(seed: int, folder: str) -> Any:
        args = arguments(tmp_path / folder, max_steps=11, save_strategy="steps", save_steps=5, **changes)
        return Trainer(language_model(seed), args, train_dataset=rows(), **budgets)

    whole = trainer(0, "run")
    whole.train()
    shutil.rmtree(tmp_path / "run" / "checkpoint-11")  # 5 is in the first epoch, 10 in the second
    for step in (10, 5):
        again = trainer(1, "run")
        again.train(resume_from_checkpoint=True if step == 10 else str(tmp_path / "run" / "checkpoint-5"))
        assert losses(again) == losses(whole)
        assert losses(again, "learning_rate") == losses(whole, "learning_rate")
        assert_same_weights(again.model, whole.model, atol=0)
    shutil.rmtree(tmp_path / "run" / "checkpoint-5" / STATE)
    with pytest.raises(ValueError, match="checkpoint-5 has weights and no state of a training"):
        trainer(1, "run").train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-5"))
    with pytest.raises(ValueError, match="checkpoint-6 is no checkpoint of a Trainer"):
        trainer(1, "run").train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-6"))


def test_the_newest_checkpoints_stay_after_the_clock_was_set_back(disk: dict[str, Any], tmp_path: Path) -> None:
    class Clock(transformers.TrainerCallback):  # type: ignore[misc]
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                for at, step in enumerate((1, 2)):
                    later = time.time() + 3600 + 10 * at
                    os.utime(tmp_path / f"checkpoint-{step}", (later, later))

    args = arguments(tmp_path, max_steps=3, save_strategy="steps", save_steps=1, save_total_limit=2)
    Trainer(language_model(), args, train_dataset=rows(), callbacks=[Clock()], **disk).train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-3"]


def test_incomplete_checkpoints_are_passed_over(tmp_path: Path) -> None:
    for step in (5, 10, 100, 200, 300, 400, 500, 600, "best700"):
        (tmp_path / f"checkpoint-{step}" / STATE).mkdir(parents=True)
        (tmp_path / f"checkpoint-{step}" / STATE / "manifest.json").touch()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text('{"global_step": 1}')
    (tmp_path / "checkpoint-100" / "trainer_state.json").write_text("{")
    (tmp_path / "checkpoint-200" / "trainer_state.json").unlink()
    shutil.rmtree(tmp_path / "checkpoint-300" / STATE)
    (tmp_path / "checkpoint-400" / "rng_state_1.pth").touch()
    (tmp_path / "checkpoint-500" / "trainer_state.json").write_text("[]")
    (tmp_path / "checkpoint-600" / STATE / "manifest.json").unlink()
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
    assert last_checkpoint(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("build", "changes"),
    [(language_model, {}), (language_model, {"save_only_model": True}), (adapted, {"save_only_model": True})],
    ids=["state", "model", "adapters"],
)
def test_best_model_is_loaded_and_old_checkpoints_go(
    build: Any, changes: Any, disk: dict[str, Any], tmp_path: Path
) -> None:
    fields = {
        "learning_rate": 0.3,  # so that later is not better
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 1,
        "load_best_model_at_end": True,
        **changes,
    }
    model = build(dropout=0.0)
    data = {"train_dataset": rows(), "eval_dataset": rows(1, 8)}
    plain = transformers.Trainer(copy.deepcopy(model), arguments(tmp_path / "plain", **fields), **data)
    plain.train()
    ours = Trainer(model, arguments(tmp_path / "ours", **fields), **data, **disk)
    ours.train()
    best = ours.state.best_global_step
    assert best == plain.state.best_global_step < 6
    assert [path.name for path in (tmp_path / "ours").glob("checkpoint-*")] == [f"checkpoint-{best}"]
    assert_same_weights(model, plain.model)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`")
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_adapters_train_and_are_saved_as_with_the_plain_trainer(dora: bool, tmp_path: Path) -> None:
    def trainer(kind: Any, folder: str, seed: int = 0, **budgets: Any) -> Any:
        args = arguments(tmp_path / folder, save_strategy="steps", save_steps=3)
        return kind(adapted(seed, dora), args, train_dataset=rows(), **budgets)

    budgets = {**ON_DISK, "disk": tmp_path / "disk"}
    plain = trainer(transformers.Trainer, "plain")
    plain.train()
    whole = trainer(Trainer, "run", **budgets)
    whole.train()
    assert losses(whole) == pytest.approx(losses(plain), rel=1e-5)
    files = [tmp_path / name / "checkpoint-6" / "adapter_model.safetensors" for name in ("run", "plain")]
    ours, theirs = map(safetensors.load_file, files)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-5)
    shutil.rmtree(tmp_path / "run" / "checkpoint-6")
    again = trainer(Trainer, "run", 1, **budgets)
    again.train(resume_from_checkpoint=True)
    assert losses(again) == losses(whole)
    again = safetensors.load_file(files[0])
    assert all(torch.equal(again[name], value) for name, value in ours.items())
    left_out = json.loads((tmp_path / "run" / "checkpoint-3" / STATE / "manifest.json").read_text())["left_out"]
    assert "base_model.model.lm_head.weight" in left_out


def test_saved_model_opens_in_transformers(disk: dict[str, Any], tmp_path: Path) -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="b")
    model = language_model()
    trainer = Trainer(model, arguments(tmp_path), train_dataset=rows(), processing_class=tokenizer, **disk)
    trainer.train()
    trainer.save_model(tmp_path / "model")
    state = trainer.accelerator.get_state_dict(model)
    model.save_pretrained(tmp_path / "again", state_dict=state, save_function=trainer.accelerator.save)
    again = safetensors.load_file(tmp_path / "again" / "model.safetensors")
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for name, value in weights(model).items():
        assert torch.equal(opened.get_parameter(name), value) and torch.equal(again[name], value), name
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "model").get_vocab() == tokenizer.get_vocab()
    prompt = torch.tensor([[1, 2, 3]])
    model.eval()
    assert torch.equal(model.generate(prompt, max_new_tokens=4), opened.generate(prompt, max_new_tokens=4))
    outsize.release(model)
    assert not {"save_pretrained", "load_state_dict"} & vars(model).keys()


class Noted(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """Saves more than transformers does."""

    def save_pretrained(self, folder: Any, **options: Any) -> None:
        super().save_pretrained(folder, **options)
        Path(folder, "note.txt").touch()


class Passing(torch.nn.Module):
    """Saves what it wraps."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.inner = transformers.LlamaForCausalLM(config)

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name in ("inner", "_modules") else getattr(self.inner, name)


@pytest.mark.parametrize("kind", [Noted, Passing])
def test_a_save_of_another_class_is_that_class(kind: Any, disk: dict[str, Any], tmp_path: Path) -> None:
    model = kind(language_model().config)
    outsize.prepare(model, device="cpu", **disk)
    with pytest.raises(RuntimeError, match="outsize.gathered"):
        model.save_pretrained(tmp_path / "at rest")
    with outsize.gathered(model):
        model.save_pretrained(tmp_path / "model")
    assert "lm_head.weight" in safetensors.load_file(tmp_path / "model" / "model.safetensors")
    if kind is Noted:
        Trainer(kind(model.config), arguments(tmp_path), train_dataset=rows(), **disk).save_model(tmp_path / "saved")
        assert {path.name for path in (tmp_path / "saved").iterdir()} >= {"note.txt", "model.safetensors"}


def prepared(model: Any) -> Any:
    outsize.prepare(model, torch.optim.AdamW(model.parameters()), device="cpu", host_memory="8MiB")
    return model


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda model: {"model": torch.nn.DataParallel(model)}, "wrapped in DataParallel.*pass the model itself"),
        (lambda model: {"model": prepared(model)}, r"pass the optimizer that was prepared.*outsize.release\(model\)"),
        (lambda model: {"model_init": lambda: model}, "model_init is given.*pass the model"),
        (lambda model: {"model": model, "torch_compile": True}, "torch_compile is on.*layers"),
        (lambda model: {"model": model, "bf16_full_eval": True}, "bf16_full_eval.*bf16=True evaluates"),
        (lambda model: {"model": model, "sync_ref_model": True}, "sync_ref_model is on.*outsize.gathered"),
        (lambda model: {"model": model, "_n_gpu": 2}, "one process sees 2 accelerators.*torchrun"),
        (lambda model: {"model": model, "host_memory": "1 apple"}, "1 apple"),
    ],
)
def test_what_cannot_train_is_refused_with_the_remedy(spoil: Any, message: str, tmp_path: Path) -> None:
    given = spoil(language_model())
    args = arguments(tmp_path)
    for name in ("torch_compile", "_n_gpu", "sync_ref_model", "bf16_full_eval"):
        setattr(args, name, given.pop(name, getattr(args, name, False)))
    with pytest.raises(ValueError, match=message):
        Trainer(args=args, train_dataset=rows(), **given)


def rank_of_two(build: Any, folder: Path) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    """What a whole run shows, and what one shows that goes on from its third step."""
    rank = torch.distributed.get_rank()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    fields = {"per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 3, "max_grad_norm": 0.05}
    budgets = {**ON_DISK, "disk": folder / "disk"}
    shown = []
    for resume in (None, str(folder / "run" / "checkpoint-3")):
        model = build(seed=0 if resume is None else 1, dropout=0.0)
        trainer = Trainer(model, arguments(folder / "run", **fields), train_dataset=rows(), **budgets)
        trainer.train(resume)
        assert trainer.model_wrapped is model
        shown.append((losses(trainer), weights(model)))
        if resume is None:
            trainer.save_model(folder / "model")
    return shown


def test_two_ranks_train_and_resume_like_one_plain_trainer(disk: dict[str, Any], tmp_path: Path) -> None:
    builds = {"whole": language_model, "adapters": adapted}
    calls = [(rank_of_two, build, tmp_path / name) for name, build in builds.items()]
    for each in builds:
        (tmp_path / each).mkdir()
    first, second = run_on_ranks(2, in_turn, *calls)
    for (name, build), ours, theirs in zip(builds.items(), first, second, strict=True):
        args = arguments(tmp_path / "plain", max_grad_norm=0.05)
        plain = transformers.Trainer(build(dropout=0.0), args, train_dataset=rows())
        plain.train()
        (whole, values), (resumed, again) = ours
        assert whole == theirs[0][0] == pytest.approx(losses(plain), rel=1e-5)
        for key, value in plain.model.named_parameters():
            torch.testing.assert_close(values[key], value.detach(), rtol=0, atol=1e-5)
        assert resumed == whole
        assert all(torch.equal(again[key], value) for key, value in values.items())
        if name == "whole":
            opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name / "model")
        else:
            opened = pytest.importorskip("peft").PeftModel.from_pretrained(language_model(), tmp_path / name / "model")
        assert all(torch.equal(opened.get_parameter(key), value) for key, value in values.items())
