"""The trained head's script: the published layout, the unrolled steps, and that a loss falls (tools/train_eagle.py)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import torch
from eagle.corpus import Conversation
from eagle.head import Head, load_head, save_head
from eagle.prompts import chat_prompts
from eagle.start import fit_start
from eagle.target import Target, extract, feature_layers, open_features
from eagle.training import Plan, batches, measure, step_loss, train
from speculation import prompts_of
from tiny import IDS, C, V, golden, write_hf
from train_eagle import new_head

pytestmark = pytest.mark.oracle

DRAFT = 40


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    config, weights, _ = golden("llama")
    return Target.load(write_hf(config, weights, tmp_path_factory.mktemp("llama") / "hf"))


def conversations(count: int) -> list[Conversation]:
    """A text in which each token tells the next, behind prompts of several lengths."""
    lines = []
    for start in range(count):
        ids = [(7 * (start + n) + 3) % DRAFT for n in range(12 + start % 5)]
        lines.append(Conversation(ids, [n >= 4 for n in range(len(ids))], start % 2 == 0))
    return lines


def test_prompts_are_the_same_each_time_and_not_the_benchmark_s() -> None:
    made = chat_prompts(3000, 7)
    assert len(set(made)) == 3000
    assert made[:100] == chat_prompts(100, 7) != chat_prompts(100, 8)
    assert not set(made) & set(prompts_of("chat"))


def test_target_agrees_with_transformers(target: Target) -> None:
    final = target.states(torch.tensor([IDS, IDS[::-1]]))[0, :, 3]
    logits = golden("llama")[2]
    np.testing.assert_allclose(final @ target.head.T, logits, rtol=0, atol=1e-4 * np.abs(logits).max())


def test_head_that_is_the_last_layer_agrees_with_transformers(target: Target) -> None:
    """With the last layer's input as its feature and no eye for the embedding, the head is the target's last layer."""
    assert feature_layers(3) == (2, 1, 0)
    head, last = new_head(target, conversations(8), V, None), target.layers[-1]
    head.d2t, head.output = torch.zeros(V, dtype=torch.long), target.head
    blind = torch.cat((torch.zeros_like(last["qkv"]), last["qkv"]), 1)  # [q, k and v, 2C]
    gate, up = last["gate_up"].chunk(2)
    layer = "midlayer."
    given = {
        "fc.weight": torch.eye(C, 3 * C),  # the first feature enters layer 2 of 3
        layer + "hidden_norm.weight": last["attn_norm"],
        layer + "input_layernorm.weight": torch.ones(C),
        layer + "post_attention_layernorm.weight": last["ffn_norm"],
        layer + "self_attn.q_proj.weight": blind[:C],
        layer + "self_attn.k_proj.weight": blind[C : C + C // 2],
        layer + "self_attn.v_proj.weight": blind[C + C // 2 :],
        layer + "self_attn.o_proj.weight": last["out"],
        layer + "mlp.gate_proj.weight": gate,
        layer + "mlp.up_proj.weight": up,
        layer + "mlp.down_proj.weight": last["down"],
        "norm.weight": target.final_norm,
    }
    missing = head.load_state_dict(given, strict=False)
    assert not missing.unexpected_keys
    assert missing.missing_keys == ["d2t", "t2d"]
    features = target.states(torch.tensor([IDS]))[:, :, :3].flatten(2)
    [made] = head.unroll(features, torch.tensor([[*IDS[1:], 5]]), 1)
    logits = golden("llama")[2]
    np.testing.assert_allclose(head.logits(made)[0].detach(), logits, rtol=0, atol=1e-4 * np.abs(logits).max())


def test_unrolled_steps_are_what_guessing_one_at_a_time_gives(target: Target) -> None:
    torch.manual_seed(1)
    head = new_head(target, conversations(8), DRAFT, None)
    features = target.states(torch.tensor([IDS]))[0, :, :3].flatten(1)
    for end in (1, 7, 20):
        known = torch.tensor(IDS[: end + 1])
        guesses = head.guess(features[:end], known, 4)
        assert all(head.t2d[guess] for guess in guesses)
        ids = torch.tensor([[*IDS[1 : end + 1], *guesses[:3]]])
        steps = head.unroll(features[None, :end], ids, 4)
        assert [int(head.draft_ids[head.logits(x)[0, -1].argmax()]) for x in steps] == guesses


def test_loss_falls_and_guesses_come_true(target: Target, tmp_path: Path) -> None:
    torch.manual_seed(2)
    lines = conversations(40)
    for part in (lines[:25], lines):  # the second call goes on from the first
        extract(target, part, tmp_path / "states")
    data = open_features(lines, tmp_path / "states", C)
    assert len(data.lines) == 40
    np.testing.assert_allclose(
        data.states[data.starts[30] : data.starts[31]], target.states(torch.tensor([lines[30].ids]))[0], atol=0.02
    )
    head = new_head(target, lines, DRAFT, None)
    head.output = torch.randn(DRAFT, C)  # a target that can be learned: of each token what its own text goes on with
    following = torch.zeros(V, C)
    following[torch.arange(DRAFT)] = 40 * torch.nn.functional.normalize(head.output[(torch.arange(DRAFT) + 7) % DRAFT])
    states = np.array(data.states)
    states[:, 3] = following[[token for line in lines for token in line.ids]]
    data = type(data)(data.lines, data.starts, states)
    before, losses, plan = (
        measure(head, data, list(range(40)), 3),
        list[float](),
        Plan(1, batches=60, tokens=256, rate=1e-2),
    )
    losses.append(step_loss(head, next(batches(head, data, list(range(40)), plan)), plan).item())
    train(head, data, list(range(40)), plan, lambda _, __, x: losses.append(x))
    after = measure(head, data, list(range(40)), 3)
    assert losses[-1] < 0.5 * losses[0]
    assert after.length > 3 > before.length


def test_file_has_the_published_layout(target: Target, tmp_path: Path) -> None:
    head = new_head(target, conversations(40), DRAFT, 4)
    ids = torch.tensor(IDS[:6])
    features = target.states(ids[None, :5])[0, :, :3].flatten(1)
    old = head.unroll(features[None], ids[None, 1:], 1)[0].detach()
    head.rescale(0.1 + torch.rand(3 * C))  # which training does; neither what the head computes nor the file shows it
    np.testing.assert_allclose(head.unroll(features[None], ids[None, 1:], 1)[0].detach(), old, atol=1e-5)
    save_head(head, tmp_path, {"tokens": 0})
    from safetensors.numpy import load_file

    shapes = {
        name: (tensor.shape, str(tensor.dtype)) for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    layer, attention, f = "midlayer.", "midlayer.self_attn.", 80
    assert shapes == {
        "fc.weight": ((C, 3 * C), "float16"),
        layer + "hidden_norm.weight": ((C,), "float16"),
        layer + "input_layernorm.weight": ((C,), "float16"),
        layer + "post_attention_layernorm.weight": ((C,), "float16"),
        attention + "q_proj.weight": ((C, 2 * C), "float16"),
        attention + "k_proj.weight": ((C, 2 * C), "float16"),  # 4 KV heads of 12, where the target has 2
        attention + "v_proj.weight": ((C, 2 * C), "float16"),
        attention + "o_proj.weight": ((C, C), "float16"),
        layer + "mlp.gate_proj.weight": ((f, C), "float16"),
        layer + "mlp.up_proj.weight": ((f, C), "float16"),
        layer + "mlp.down_proj.weight": ((C, f), "float16"),
        "norm.weight": ((C,), "float16"),
        "d2t": ((DRAFT,), "int64"),
        "t2d": ((V,), "bool"),
    }
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["draft_vocab_size"], config["num_key_value_heads"], config["vocab_size"]) == (DRAFT, 4, V)
    again = load_head(tmp_path, target)
    assert isinstance(again, Head)
    np.testing.assert_allclose(again.unroll(features[None], ids[None, 1:], 1)[0].detach(), old, atol=0.02)


def test_start_is_the_best_linear_guess(target: Target, tmp_path: Path) -> None:
    """Where the final state is linear in the features and the next embedding, the head begins by knowing it."""
    torch.manual_seed(3)
    rng = np.random.default_rng(3)
    lines = [Conversation(list(map(int, rng.integers(0, V, 60))), [True] * 60, True) for _ in range(40)]
    extract(target, lines, tmp_path / "states")
    data = open_features(lines, tmp_path / "states", C)
    head = new_head(target, lines, V, None)
    by_feature, by_token = (
        torch.randn(C, 3 * C) / 100,
        torch.randn(C, 24) @ torch.randn(24, C) / 5,
    )  # 24: rank of values
    by_feature[:, 0] = 1  # most models' final states have much in common
    states = np.array(data.states, np.float32)
    states[:, 0, 0] = 4
    for i in range(40):
        part = slice(data.starts[i], data.starts[i + 1])
        features = torch.from_numpy(states[part, :3]).flatten(1)[:-1]
        embedded = head.midlayer.input_layernorm(target.embedding[torch.tensor(lines[i].ids[1:])]).detach()
        goal = features @ by_feature.T + embedded @ by_token.T
        states[part, 3][1:] = goal * target.final_norm
    data = type(data)(data.lines, data.starts, states)
    fit_start(head, target, data, list(range(40)))
    ids = torch.tensor([lines[0].ids])
    [x] = head.unroll(torch.from_numpy(states[:59, :3]).flatten(1)[None], ids[:, 1:], 1)
    goal = torch.from_numpy(states[1:60, 3]) / target.final_norm
    error = (x[0, :-1] - goal[:-1]).pow(2).mean() / goal.var()
    assert error < 0.1  # attention looks at its own position, not quite alone
