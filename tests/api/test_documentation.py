"""The documentation runs: examples of docstrings, snippets of the pages, notebooks; and what it quotes is true."""

import ast
import doctest
import json
import re
from collections import OrderedDict
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outsize
import outsize.optim
from outsize.integrations.deepspeed import config_from

ROOT = Path(__file__).parents[2]
OF_PLAIN_MODELS = ("BudgetError", "Config", "init", "plan", "prepare")
NOT_CALLED = ("__version__", "presets")
PUBLIC = {name: getattr(outsize, name) for name in outsize.__all__ if name not in NOT_CALLED}
OPTIMIZERS = {name: getattr(outsize.optim, name) for name in ("LazyAdamW", "Lion", "RowwiseAdagrad")}
OTHERS = {**OPTIMIZERS, "config_from": config_from}


@pytest.mark.parametrize("name", [*PUBLIC, *OTHERS])
def test_example_of_the_docstring_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("disk").mkdir()
    model = nn.Sequential(OrderedDict(body=nn.Linear(8, 8), head=nn.Linear(8, 4)))
    optimizer = torch.optim.AdamW(model.parameters())
    if name in PUBLIC and name not in OF_PLAIN_MODELS:
        outsize.prepare(model, optimizer, host_memory="64MiB", disk="disk", params="disk", states="disk")
        model(torch.ones(2, 8)).sum().backward()
    loader = [torch.randn(2, 8) for _ in range(2)]
    known: dict[str, Any] = {  # by the examples
        "torch": torch,
        "outsize": outsize,
        "model": model,
        "optimizer": optimizer,
        "loader": loader,
    }
    found = (PUBLIC | OTHERS)[name]
    (example,) = (each for each in doctest.DocTestFinder().find(found, name, globs=known) if each.name == name)
    assert example.examples
    said: list[str] = []
    assert doctest.DocTestRunner().run(example, out=said.append).failed == 0, "".join(said)


# -- pages -------------------------------------------------------------------------------------------------------------

SNIPPET = re.compile(r"^(<!-- fragment -->\n)?```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
IMPORTED = {
    "OrderedDict": OrderedDict,
    "Path": Path,
    "TensorDataset": torch.utils.data.TensorDataset,
    "nn": nn,
    "outsize": outsize,
    "torch": torch,
}
PLAIN = """
model = nn.Sequential(OrderedDict(body=nn.Linear(8, 8), lm_head=nn.Linear(8, 4)))
optimizer = torch.optim.AdamW(model.parameters())
batch = (torch.ones(2, 8),)
"""
SCHEDULER = """
class scheduler:
    step = staticmethod(lambda: None)
    state_dict = staticmethod(lambda: {"lr": 1.0})
"""
PREPARED = f"""{PLAIN}{SCHEDULER}
state = {{name: value.clone() for name, value in model.state_dict().items()}}
outsize.prepare(model, optimizer, params="disk", states="disk", disk="disk")
model(*batch).sum().backward()
optimizer.step()
"""
LLAMA = """
import transformers
MyModel = transformers.LlamaForCausalLM
config = transformers.LlamaConfig(
    hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=32, use_cache=False
)
ids = torch.arange(8)[None]
loader = [{"input_ids": ids, "labels": ids}]
data = [{"input_ids": ids[0], "labels": ids[0]}]
"""
SAVED_LLAMA = f"""{LLAMA}
for folder in ("base/", "model/"):
    MyModel(config).save_pretrained(folder)
prompts, inputs = ["one"], {{"input_ids": ids}}
tokenizer = lambda *_, **__: inputs
"""
ADAPTED = f"""{SAVED_LLAMA}
import peft
peft.get_peft_model(MyModel(config), peft.LoraConfig(target_modules=["q_proj"])).save_pretrained("adapters/")
"""
TABLE = """
class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(64, 8, sparse=True)
    def forward(self, batch):
        return self.items(batch["item"])
loader = [{"item": torch.arange(4)}]
hash_of = lambda ids: ids
rows, width = 64, 8
model = Recommender()
"""
PREPARED_TABLE = """
outsize.prepare(model, outsize.optim.LazyAdamW(model.parameters()), disk="disk")
"""
LAYERS = """
model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)))
optimizer = torch.optim.AdamW(model.parameters())
outsize.prepare(model, optimizer, params="disk", disk="disk")
for _ in range(3):
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
"""
PAGES = {
    "README.md": [LLAMA + SCHEDULER],
    "docs/quick-start.md": [""] * 7,
    "docs/accelerate.md": [
        PLAIN + SCHEDULER + "loader = torch.utils.data.DataLoader(TensorDataset(torch.ones(4, 8), torch.ones(4, 4)))\n"
        "loss_function = nn.functional.mse_loss"
    ],
    "docs/activations.md": [LAYERS, PLAIN, PLAIN, LLAMA + "model = MyModel(config)"],
    "docs/checkpoint-format.md": [PREPARED + 'outsize.save("ckpt/step-100", model, optimizer).wait()'],
    "docs/checkpoints.md": [PREPARED],
    "docs/configuration.md": [PLAIN, PLAIN],
    "docs/embeddings.md": [TABLE, TABLE + PREPARED_TABLE, TABLE],
    "docs/fine-tuning.md": [ADAPTED, ADAPTED],
    "docs/inference.md": [SAVED_LLAMA, SAVED_LLAMA + "model = MyModel(config)"],
    "docs/limits.md": [PREPARED],
    "docs/moving.md": [
        PLAIN,
        PLAIN + 'Path("ds_config.json").write_text(\'{"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}\')',
    ],
    "docs/ranks.md": [LLAMA + "model, batches = MyModel(config), loader * 2\noutsize.prepare(model)"],
    "docs/transformers.md": [SAVED_LLAMA + "model = MyModel(config)", ADAPTED],
}
"""What each snippet of a page takes as known, in the order of the page, fragments left out."""


def snippets_of(page: Path) -> list[tuple[int, str]]:
    """(the line of the page, the code) of each snippet that is no fragment."""
    text = page.read_text()
    return [(text.count("\n", 0, found.start(2)), found[2]) for found in SNIPPET.finditer(text) if not found[1]]


def test_every_page_is_known() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    counts = {str(page.relative_to(ROOT)): len(snippets_of(page)) for page in pages if snippets_of(page)}
    assert counts == {page: len(setups) for page, setups in PAGES.items()}, (
        "a page has a new snippet: say in PAGES what it takes as known, or put <!-- fragment --> on the line above"
    )


def linked(page: Path) -> set[Path]:
    """The files that a page links to."""
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()) if page.suffix == ".md" else ()
    return {(page.parent / target).resolve() for target in targets if "://" not in target}


def test_every_page_is_three_clicks_from_the_readme() -> None:
    found = {ROOT / "README.md"}
    for _ in range(3):
        found |= {target for page in found for target in linked(page)}
    assert not [page for page in found if not page.exists()]
    assert set((ROOT / "docs").rglob("*.md")) <= found


@pytest.mark.filterwarnings("default")  # what other libraries say of their own defaults
@pytest.mark.parametrize("page", PAGES)
def test_snippets_of_the_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(outsize, "probe", lambda **_: None)  # takes 20 s
    known: dict[str, Any] = {"__name__": "page", **IMPORTED}
    for (line, code), setup in zip(snippets_of(ROOT / page), PAGES[page], strict=True):
        exec(setup, known)
        code = code.replace("/mnt/nvme", "disk")
        if "cache=cache" in code and "cache" not in signature(known["model"].forward).parameters:
            code = code.replace("cache=cache", "past_key_values=cache")  # an older version of transformers
        exec(compile("\n" * line + code, ROOT / page, "exec"), known)


def test_the_plan_of_the_quick_start_is_the_one_that_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    known: dict[str, Any] = {}
    for _, code in snippets_of(ROOT / "docs" / "quick-start.md")[:2]:
        exec(code, known)
    printed = capsys.readouterr().out
    (shown,) = re.findall(r"^```\n(unit .*?)\n```$", (ROOT / "docs" / "quick-start.md").read_text(), re.M | re.DOTALL)
    assert printed.startswith(shown)
    notebook = json.loads((ROOT / "examples" / "notebooks" / "quick-start.ipynb").read_text())
    outputs = [out for cell in notebook["cells"] for out in cell.get("outputs", ())]
    assert any("".join(out.get("text", "")).startswith(shown) for out in outputs)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["quick-start", "fine-tuning", "inside-a-step"])
def test_notebook_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    path = ROOT / "examples" / "notebooks" / f"{name}.ipynb"
    known: dict[str, Any] = {"__name__": "notebook"}
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), path, "exec"), known)


def test_the_messages_of_the_troubleshooting_page_are_those_of_the_code() -> None:
    said = "\n".join(text for path in (ROOT / "src").rglob("*.py") for text in _texts(path))
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r"^### `(.*)`$", page, re.MULTILINE)
    assert len(quoted) >= 15
    for message in quoted:
        parts = [re.escape(part) for part in message.removeprefix("... ").split("...")]
        assert re.search(r"[^\n]{0,80}?".join(parts), said), message


def _texts(path: Path) -> list[str]:
    """The strings of a module, with a dot for each value that is filled in."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(str(part.value) if isinstance(part, ast.Constant) else "." for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


def test_pre_commit_has_the_pinned_versions() -> None:
    pinned = re.findall(r'"((?:ruff|clang-format)==[^"]+)"', (ROOT / "pyproject.toml").read_text())
    assert len(pinned) == 2
    assert set(re.findall(r'\["([^"]+)"\]', (ROOT / ".pre-commit-config.yaml").read_text())) == set(pinned)
