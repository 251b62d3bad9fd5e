"""What users of transformers do between their training steps, on models whose weights are on disk."""

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import outsize
from tests.conftest import take_step

Make = Callable[..., Any]


def prompts(name: str) -> dict[str, torch.Tensor]:
    """Two prompts, one of them padded on the left; what the model of the zoo generates from."""
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(2))}
    ids = torch.tensor([[5, 6, 7, 8], [0, 0, 9, 10]])
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


WAYS = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 0.9},
    "beams": {"do_sample": False, "num_beams": 3},
}


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("gpt2", "greedy"),
        ("gpt2", "beams"),
        ("llama", "sampling"),
        ("mixtral", "greedy"),
        ("t5", "beams"),
        ("whisper", "sampling"),
    ],
)
def test_generates_between_steps_what_torch_generates(twins: Make, name: str, way: str) -> None:
    pair = twins(name)
    pair.train(1)
    settings = {"max_new_tokens": 4, "min_new_tokens": 4} | WAYS[way]
    if name == "mixtral":
        settings["output_router_logits"] = False  # transformers cannot balance the load of padded prompts
    generated = []
    for model in (pair.model, pair.plain):
        model.eval()
        torch.manual_seed(3)
        generated.append(model.generate(**prompts(name), **settings))
        model.train()
    assert torch.equal(*generated)
    pair.train(1)
    pair.check_weights()


@pytest.mark.parametrize("name", ["gpt2 with dropout", "llama", "bert", "t5", "vit"])
def test_evaluates_between_steps_as_torch_does(twins: Make, name: str) -> None:
    pair = twins(name)
    batch = pair.batch(torch.Generator().manual_seed(9))
    for _ in range(2):
        pair.train(1)
        losses = []
        for model in (pair.model, pair.plain):
            model.eval()
            with torch.no_grad():
                losses.append(model(**batch).loss)
            with torch.inference_mode():
                losses.append(model(**batch).loss)
            losses.append(model(**batch).loss.detach())  # gradients are recorded and never asked for
            model.train()
        torch.testing.assert_close(losses[:3], losses[3:], rtol=1e-6, atol=0.0)
    pair.check_weights()


@pytest.mark.parametrize(
    ("name", "attention"),
    [("llama", "sdpa"), *((name, "eager") for name in ("gpt2", "llama", "bert", "vit", "whisper"))],
)
def test_trains_with_either_attention(twins: Make, name: str, attention: str) -> None:
    pair = twins(name, build={"attn_implementation": attention})
    pair.train()
    pair.check_weights()


def test_switches_attention_after_prepare(twins: Make) -> None:
    pair = twins("llama")
    pair.train(1)
    for model in (pair.model, pair.plain):
        model.set_attn_implementation("eager")
    pair.train(2)
    pair.check_weights()


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_accumulates_over_batches(twins: Make, name: str) -> None:
    pair = twins(name)
    for step in range(2):
        batches = [pair.batch(pair.random) for _ in range(3)]
        for model, optimizer in ((pair.model, pair.optimizer), (pair.plain, pair.plain_optimizer)):
            for batch in batches:
                (model(**batch).loss / 3).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 0)
    pair.train(2)
    pair.check_weights()


def test_hidden_states_and_attentions_are_those_of_torch(twins: Make) -> None:
    pair = twins("llama", build={"attn_implementation": "eager"})
    pair.train(1)
    batch = pair.batch(torch.Generator().manual_seed(9))
    asked = {"output_hidden_states": True, "output_attentions": True}
    found, expected = (model(**batch, **asked) for model in (pair.model, pair.plain))
    torch.testing.assert_close(found.hidden_states, expected.hidden_states, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.attentions, expected.attentions, rtol=1e-5, atol=1e-5)


def test_trains_from_input_embeddings(twins: Make) -> None:
    pair = twins("llama")
    ids = pair.batch(pair.random)["input_ids"]
    losses = []
    for model in (pair.model, pair.plain):
        loss = model(inputs_embeds=model.get_input_embeddings()(ids), labels=ids).loss
        loss.backward()
        losses.append(loss.detach())
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0.0)


def test_says_about_itself_what_the_plain_model_says(twins: Make) -> None:
    pair = twins("gpt2")
    for ask in (
        lambda model: model.num_parameters(),
        lambda model: model.num_parameters(only_trainable=True, exclude_embeddings=True),
        lambda model: model.device,
        lambda model: model.dtype,
        lambda model: model.get_memory_footprint(),
        lambda model: str(model),
        lambda model: repr(model.get_input_embeddings()),
        lambda model: model.get_output_embeddings().weight is model.get_input_embeddings().weight,
        lambda model: [(name, param.shape) for name, param in model.named_parameters()],
    ):
        assert ask(pair.model) == ask(pair.plain)


@pytest.mark.parametrize("place", ["disk", "device"])
def test_resizing_the_embeddings_is_refused_and_breaks_nothing(twins: Make, place: str) -> None:
    tiers = dict.fromkeys(("params", "grads", "states"), place)
    pair = twins("gpt2", host_memory="512KiB" if place == "disk" else "1GiB", **tiers)
    with pytest.raises(RuntimeError, match=r"transformer\.wte\.weight.*outsize"):
        pair.model.resize_token_embeddings(120)
    pair.train(2)
    pair.check_weights()


@pytest.mark.parametrize("act", [lambda model: model.half(), lambda model: model.to(torch.bfloat16), copy.deepcopy])
def test_casts_and_copies_are_refused_with_the_remedy(twins: Make, act: Callable[[nn.Module], Any]) -> None:
    pair = twins("llama")
    with pytest.raises(RuntimeError, match=r"outsize\.(prepare|save)"):
        act(pair.model)
    pair.train(2)


class LowRank(nn.Module):
    """LoRA (Hu et al. 2021) by hand: a frozen linear layer and a small trainable detour."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 0.5 * self.up(self.down(x))


def with_adapters(model: Any) -> Any:
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = LowRank(layer.self_attn.q_proj)
        layer.self_attn.v_proj = LowRank(layer.self_attn.v_proj)
    return model


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
def test_trains_adapters_on_a_frozen_model(twins: Make, activations: str, checkpointing: bool) -> None:
    pair = twins("llama", change=with_adapters, activations=activations)
    frozen = copy.deepcopy(pair.plain.model.embed_tokens.weight)
    if checkpointing:
        for model in (pair.model, pair.plain):
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": True})
    pair.train()
    pair.check_weights()
    with outsize.gathered(pair.model.model.embed_tokens):
        assert torch.equal(pair.model.model.embed_tokens.weight, frozen)
    states = sum(nbytes for name, nbytes in outsize.memory(pair.model).now.items() if name.endswith("/states"))
    assert states < pair.bytes, "frozen parameters have no optimizer state"


def test_unfreezes_layers_in_mid_run(twins: Make) -> None:
    pair = twins("llama")
    for model in (pair.model, pair.plain):
        model.model.requires_grad_(False)
    pair.train(2)
    for model in (pair.model, pair.plain):
        model.model.layers[1:].requires_grad_(True)
    pair.train(2)
    for model in (pair.model, pair.plain):
        model.requires_grad_(True)
    pair.train(2)
    pair.check_weights()


def rounded(master: torch.Tensor) -> torch.Tensor:
    """fp32 to bf16, to nearest with ties up: the weight of a master, as DESIGN.md has it."""
    return ((master.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "vit"])
def test_bf16_model_trains_like_one_with_masters_kept_by_hand(
    zoo: dict[str, Any], everything_on_disk: dict[str, Any], name: str
) -> None:
    torch.manual_seed(0)
    case = zoo[name]
    model = case.build(dtype=torch.bfloat16).to(torch.bfloat16)
    plain = copy.deepcopy(model)
    masters = [param.detach().float() for param in plain.parameters()]
    by_hand = torch.optim.AdamW(masters, lr=1e-3, eps=1e-5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    outsize.prepare(model, optimizer, host_memory="512KiB", **everything_on_disk)
    random = torch.Generator().manual_seed(1)
    for _ in range(4):
        batch = case.batch(random)
        batch = {key: value.bfloat16() if value.is_floating_point() else value for key, value in batch.items()}
        loss = model(**batch).loss
        take_step(loss, optimizer, clip=(model.parameters(), 1.0))
        plain_loss = plain(**batch).loss
        plain_loss.backward()
        for master, param in zip(masters, plain.parameters(), strict=True):
            master.grad, param.grad = param.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        by_hand.step()
        with torch.no_grad():
            for master, param in zip(masters, plain.parameters(), strict=True):
                param.copy_(rounded(master))
        assert torch.equal(loss, plain_loss)
    with outsize.gathered(model):
        for (label, param), (_, other) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            assert torch.equal(param, other), label


def cache_name(model: nn.Module) -> str:
    """What this version of transformers calls the argument and the field of a result."""
    parameters = inspect.signature(type(model).forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "whisper"])
def test_the_cache_of_a_training_forward_is_what_torch_has_or_cannot_be_read(twins: Make, name: str) -> None:
    """Recomputed layers leave it empty, which is refused; kept ones fill it."""
    recomputed, kept = twins(name, host_memory="64MiB"), twins(name, activations="keep")
    recomputed.train(1)
    batch = kept.batch(torch.Generator().manual_seed(9))
    field = cache_name(kept.plain)
    lengths = [getattr(model(**batch, use_cache=True), field).get_seq_length() for model in (kept.model, kept.plain)]
    assert lengths[0] == lengths[1] > 0
    cache = getattr(recomputed.model(**batch, use_cache=True), field)
    with pytest.raises(RuntimeError, match=r"is recomputed in the backward, .* pass activations=\"keep\""):
        cache.get_seq_length()
    with pytest.raises(RuntimeError, match="is recomputed in the backward"):
        recomputed.model(**batch, **{field: copy.deepcopy(cache)})
    recomputed.train(1)


def test_caches_made_after_one_that_was_left_empty_work(twins: Make) -> None:
    """One made without a configuration names the class of its layers, which all caches share."""
    from transformers import DynamicCache

    pair = twins("llama", host_memory="64MiB")
    batch = pair.batch(torch.Generator().manual_seed(9))
    pair.model(**batch, **{cache_name(pair.plain): DynamicCache()})
    with torch.no_grad():
        lengths = [
            getattr(model(**batch, use_cache=True), cache_name(pair.plain)).get_seq_length()
            for model in (pair.model, pair.plain)
        ]
    assert lengths[0] == lengths[1] > 0


def only_the_last_block(model: nn.Module) -> nn.Module:
    model.requires_grad_(False)
    model.decoder.block[-1].requires_grad_(True)
    return model


def test_a_layer_that_stays_in_memory_may_ask_the_cache_about_itself(twins: Make) -> None:
    fields = dict.fromkeys(("params", "grads", "states"), "auto")
    pair = twins("t5", change=only_the_last_block, host_memory="740KiB", **fields)
    rests = {unit.name: unit.tiers.params for unit in outsize.plan(pair.model).units}
    assert (rests["decoder.block.0"], rests["decoder.block.1"]) == ("disk", "device")
    pair.train(2)
    pair.check_weights()


def only_the_first_layer(model: nn.Module) -> nn.Module:
    model.requires_grad_(False)
    model.model.layers[0].requires_grad_(True)
    return model


def test_layers_are_recomputed_after_one_that_fills_the_cache(twins: Make) -> None:
    fields = dict.fromkeys(("params", "grads", "states"), "auto")
    pair = twins("llama", {"num_hidden_layers": 6}, only_the_first_layer, host_memory="680KiB", **fields)
    rests = {unit.name: unit.tiers.params for unit in outsize.plan(pair.model).units}
    assert (rests["model.layers.0"], rests["model.layers.1"]) == ("device", "disk")
    batch = pair.batch(torch.Generator().manual_seed(9))
    cache = getattr(pair.model(**batch, use_cache=True), cache_name(pair.plain))
    with pytest.raises(RuntimeError, match=r"layer 'model.layers.1' is recomputed in the backward"):
        cache.get_seq_length()
    with pytest.raises(RuntimeError, match=r"layer 'model.layers.1' is recomputed in the backward"):
        pickle.loads(pickle.dumps(cache.get_seq_length))(1)
    pair.train(2)
    pair.check_weights()


def test_gradients_flow_through_the_cache_of_kept_layers_as_in_torch(twins: Make) -> None:
    pair = twins("llama", activations="keep")
    ids = pair.batch(torch.Generator().manual_seed(9))["input_ids"]
    losses, norms = [], []
    field = cache_name(pair.plain)
    for model in (pair.model, pair.plain):
        first = model(input_ids=ids[:, :6], use_cache=True)
        before = {field: getattr(first, field)}
        losses.append(model(input_ids=ids[:, 6:], labels=ids[:, 6:], **before).loss)
        losses[-1].backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=0.0)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
