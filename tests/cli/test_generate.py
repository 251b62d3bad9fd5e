"""`outsize generate`: the answers of plain transformers, from a model larger than the budget."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from outsize.api import budgets
from outsize.cli import generating, main
from outsize.config import Config
from tests.small_models import llama_config

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("rich")

WORDS = [f"w{index}" for index in range(180)]
PROMPTS = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9", "w10 w11"]
NEW = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = llama_config(128, 256, 8, 4, 200, num_key_value_heads=2, max_position_embeddings=40, eos_token_id=199)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<unk>": 0, **{word: at for at, word in enumerate(WORDS, 1)}}, unk_token="<unk>")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder)
    return folder


def prompts_in(path: Path, *prompts: str) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
    else:
        path.write_text("\n".join(prompts) + "\n")
    return path


def generate(folder: Path, *words: Any) -> int:
    return main(["generate", str(folder), "--device", "cpu", "--host-memory", "2MiB", *map(str, words)])


def expected(folder: Path, prompts: list[str] = PROMPTS) -> list[str]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    found = []
    for prompt in prompts:
        tokens = torch.tensor([tokenizer(prompt)["input_ids"]])
        answer = model.generate(tokens, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        found.append(tokenizer.decode(answer[0, tokens.shape[1] :], skip_special_tokens=True))
    return found


@pytest.mark.parametrize("batch", [1, 3])
def test_answers_are_those_of_plain_transformers(folder: Path, tmp_path: Path, batch: int) -> None:
    out = tmp_path / "answers.jsonl"
    before = sorted(os.listdir(folder))
    prompts = prompts_in(tmp_path / "prompts.jsonl", *PROMPTS)
    assert generate(folder, "--prompts", prompts, "--out", out, "--batch", batch, "--max-new-tokens", NEW) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["prompt"] for line in lines] == PROMPTS
    assert [line["answer"] for line in lines] == expected(folder)
    assert sorted(os.listdir(folder)) == before


def test_answers_go_to_the_standard_output_as_text(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(folder, "--prompts", prompts_in(tmp_path / "p.txt", *PROMPTS), "--max-new-tokens", NEW) == 0
    shown = capsys.readouterr()
    for prompt, answer in zip(PROMPTS, expected(folder), strict=True):
        assert f"{prompt}{answer}\n" in shown.out
    assert "tokens" in shown.err


MANY = [*PROMPTS, " ".join(WORDS[40:75])] * 6  # keys and values of 25 with 40 tokens each: 4.1 MB, a layer 0.5 MB


def test_keys_and_values_beyond_the_budget_rest_on_disk(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    prompts, out = prompts_in(tmp_path / "prompts.txt", *MANY), tmp_path / "answers.jsonl"
    options = ["--prompts", prompts, "--out", out, "--batch", 25, "--max-new-tokens", NEW, "--host-memory", "3584KiB"]
    assert generate(folder, *options) == 2
    shown = capsys.readouterr().err
    assert "keys and values of 25 prompts of 40 tokens take 3.9 MiB, but --host-memory is 3.5 MiB" in shown
    assert "or name a --disk for them" in shown
    assert not out.exists()
    assert generate(folder, *options, "--disk", disk) == 0
    assert (
        "take 3.9 MiB; they rest on disk, and two layers of them at a time take 1.5 MiB of --host-memory"
        in capsys.readouterr().err
    )
    answers = [json.loads(line)["answer"] for line in out.read_text().splitlines()]
    assert answers == expected(folder, MANY[:5]) * 6
    assert not list(disk.glob("*/keys-values*"))


def test_keys_and_values_that_cannot_be_moved_say_why() -> None:
    config = transformers.MistralConfig(
        sliding_window=8, num_hidden_layers=2, hidden_size=64, num_attention_heads=2, num_key_value_heads=2
    )
    made = Config(device="cpu", host_memory="100KiB", disk="/tmp")
    with pytest.raises(
        ValueError, match=r"raise --host-memory \(KeyValueCache has nothing to move: each layer of mistral"
    ):
        generating._budgets(made, config, 100, 4, 4, argparse.Namespace(disk=["/tmp"]))


LARGE = {"num_hidden_layers": 16, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
"""8 KiB of keys and values a token."""


def test_a_budget_that_is_not_named_holds_keys_and_values_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(budgets, "available_memory", lambda: 2 << 20)
    config, made = transformers.LlamaConfig(**LARGE), Config(device="cpu")
    with pytest.raises(ValueError, match="take 3.1 MiB, but host_memory is 1.6 MiB: lower --batch"):
        generating._budgets(made, config, 100, 4, 4, argparse.Namespace(disk=None))
    args = argparse.Namespace(disk=[tmp_path])
    assert generating._budgets(made, config, 100, 4, 4, args)["host_memory"] < 1.6 * (1 << 20) - 2 * (200 << 10)
    assert args.cache == "disk"


def test_a_host_without_room_leaves_keys_and_values_to_the_disk(
    sim: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(budgets, "available_memory", lambda: 2 << 20)
    config, made = transformers.LlamaConfig(**LARGE), Config(device="sim", device_memory="1MiB")
    args = argparse.Namespace(disk=[tmp_path])
    generating._budgets(made, config, 100, 4, 4, args)
    assert args.cache == "disk"


def test_keys_and_values_beyond_an_accelerator_rest_on_the_host(
    sim: Any, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, out = prompts_in(tmp_path / "prompts.txt", *MANY[:25]), tmp_path / "answers.jsonl"
    options = ["--prompts", prompts, "--out", out, "--batch", 25, "--max-new-tokens", NEW, "--device", "sim"]
    assert generate(folder, *options, "--device-memory", "5MiB", "--host-memory", "16MiB") == 0
    assert (
        "they rest on host, and two layers of them at a time take 1000.1 KiB of --device-memory"
        in capsys.readouterr().err
    )
    answers = [json.loads(line)["answer"] for line in out.read_text().splitlines()]
    assert answers == expected(folder, MANY[:5]) * 5


LONG = " ".join(WORDS[:38])


@pytest.mark.parametrize(
    ("prompts", "more", "message"),
    [
        (
            ["w1", LONG],
            [],
            "prompt 2 has 38 tokens, and 43 with an answer of --max-new-tokens 5, but the model takes 40",
        ),
        ([], [], "holds no prompts"),
        (["w1"], ["--host-memory", "8KiB"], "take .* lower --batch, or raise --host-memory"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], prompts: list[str], more: list[str], message: str
) -> None:
    out = tmp_path / "answers.txt"
    file = prompts_in(tmp_path / "p.txt", *prompts)
    assert generate(folder, "--prompts", file, "--out", out, "--max-new-tokens", NEW, *more) == 2
    found = capsys.readouterr().err.strip().splitlines()[-1]
    assert found.startswith("outsize: ")
    assert re.search(message, found), found
    assert not out.exists()


def test_an_error_before_the_first_answer_leaves_no_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, prompts = tmp_path / "answers.jsonl", prompts_in(tmp_path / "p.txt", "w1", "w2")
    whole = generating._answers

    def fails_for(text: str) -> None:
        def answers(model: Any, tokenizer: Any, batch: Any, *rest: Any) -> list[str]:
            if batch[0].text == text:
                raise ValueError("the layer reads its cache itself")
            return whole(model, tokenizer, batch, *rest)

        monkeypatch.setattr(generating, "_answers", answers)

    options = ["--prompts", prompts, "--out", out, "--batch", 1, "--max-new-tokens", NEW]
    fails_for("w1")
    assert generate(folder, *options) == 2
    assert not out.exists()
    fails_for("w2")
    assert generate(folder, *options) == 2
    assert len(out.read_text().splitlines()) == 1  # the answer that there is stays


def test_a_full_drive_is_told_with_the_file(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, out = prompts_in(tmp_path / "p.txt", "w1"), tmp_path / "out.txt"
    full = lambda path, mode, **more: open("/dev/full", "w", **more)  # noqa: E731, SIM115
    monkeypatch.setattr(generating, "open", full, raising=False)
    assert generate(folder, "--prompts", prompts, "--out", out, "--max-new-tokens", NEW) == 2
    assert f"No space left on device: free space there (writing an answer): '{out}'" in capsys.readouterr().err


def test_an_existing_file_is_not_overwritten(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "answers.txt"
    out.write_text("mine")
    assert generate(folder, "--prompts", prompts_in(tmp_path / "p.txt", "w1"), "--out", out) == 2
    assert "exists" in capsys.readouterr().err
    assert out.read_text() == "mine"


def test_a_file_that_cannot_be_made_is_refused_before_the_model_is_loaded(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generating, "_load", None)
    prompts, link = prompts_in(tmp_path / "p.txt", "w1"), tmp_path / "link.txt"
    link.symlink_to(tmp_path / "nowhere")
    for out, words in (
        (tmp_path / "none" / "out.txt", f"there is no folder {tmp_path / 'none'}"),
        (prompts / "out.txt", f"there is no folder {prompts}"),
        (link, "exists"),
    ):
        assert generate(folder, "--prompts", prompts, "--out", out) == 2
        assert f"--out {out}" in (said := capsys.readouterr().err) and words in said
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert generate(folder, "--prompts", prompts, "--out", tmp_path / "out.txt") == 2
    assert f"the folder {tmp_path} cannot be written to" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["p.txt", "p.jsonl"])
def test_a_prompt_ends_with_its_line_and_nowhere_else(tmp_path: Path, name: str) -> None:
    prompts, file = ["w1\u2028w2", "w3\x85w4 \x0c"], tmp_path / name
    lines = (
        [json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in prompts] if file.suffix != ".txt" else prompts
    )
    file.write_bytes("\r\n\n".join(lines).encode("utf-8-sig"))
    assert generating._read_prompts(file) == prompts


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", b"\xff\xfew", r"p\.txt is not text in UTF-8 .* convert it"),
        ("p.jsonl", b'{"prompt": 3}', "is no text"),
    ],
)
def test_prompts_that_are_no_text_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        generating._read_prompts(tmp_path / name)


@pytest.mark.parametrize(("made", "message"), [(True, "no config.json in the folder"), (False, "no folder there")])
def test_a_folder_without_a_model_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], made: bool, message: str
) -> None:
    if made:
        (tmp_path / "empty").mkdir()
    assert generate(tmp_path / "empty", "--prompts", prompts_in(tmp_path / "p.txt", "w1")) == 2
    assert f"{message}; give one with weights" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", b"{}", r"the tokenizer in \S+ cannot be read: .*KeyError"),
        ("model.safetensors", b"1234567", r"the weights in \S+ cannot be read: .*SafetensorError"),
        ("model.safetensors.index.json", b"{", r"the weights in \S+ cannot be read: .*JSONDecodeError"),
        ("config.json", None, r"the weights in \S+ cannot be read: .*RuntimeError"),
    ],
)
def test_a_damaged_file_of_the_model_is_told_in_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, content: bytes | None, message: str
) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    if content is None:
        sizes = json.loads((other / file).read_text())
        content = json.dumps({**sizes, "intermediate_size": 2 * sizes["intermediate_size"]}).encode()
    if file.endswith("index.json"):
        (other / "model.safetensors").unlink()
    (other / file).write_bytes(content)
    assert generate(other, "--prompts", prompts_in(tmp_path / "p.txt", "w1"), "--max-new-tokens", NEW) == 2
    found = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search(message, found), found
