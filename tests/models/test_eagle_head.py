"""The trained head's script: the published layout, the unrolled steps, and that a loss falls
(tools/train_eagle.py).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
sys.path.insert(0, str(Path(__file__).parents[1] / "equality"))

import torch
from eagle import corpus
from eagle.corpus import Conversation, Features, Order, generate, open_features, read_corpus
from eagle.head import Head, load_head, save_head
from eagle.magpie import Prompts, user_turn
from eagle.prompts import chat_prompts
from eagle.recorder import feature_layers
from eagle.start import fit_start
from eagle.target import Target
from eagle.training import Loss, Plan, batches, measure, step_loss, train
from numpy.typing import NDArray
from speculation import prompts_of
from tiny import IDS, C, V, golden, write_hf
from train_eagle import new_head

from martlet import LLM, toy
from martlet.formats.checkpoint import open_checkpoint
from martlet.models import decoder
from martlet.models.weights import load_model
from martlet.ops.interface import StepInputs, StepLimits
from martlet.ops.reference import ReferenceBackend

pytestmark = pytest.mark.oracle

DRAFT = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config, weights, _ = golden("llama")
    return write_hf(config, weights, tmp_path_factory.mktemp("llama") / "hf")


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return Target.load(folder)


@pytest.fixture(scope="module")
def states(folder: Path) -> NDArray[np.float32]:
    """Of each of IDS the rows that are kept, [T, 4, C]."""
    ops, n = ReferenceBackend(), len(IDS)
    with open_checkpoint(folder) as checkpoint:
        model = load_model(checkpoint, ops)
    caches = [ops.kv_cache(1, 32, x.mixer.n_kv_heads, x.mixer.head_dim, "f32") for x in model.spec.layers]
    places = np.arange(n, dtype=np.int32)
    ids, starts = np.array(IDS, np.int32), np.array([0, n], np.int32)

    def step() -> Any:
        kept = decoder.Features(ops, (*feature_layers(3), 3), C)
        return decoder.forward(ops, model, caches, kept), kept.out

    inputs = StepInputs(ids, places, places, starts, np.zeros((1, 1), np.int32), places[-1:])
    return ops.capture(step, StepLimits(32, 1, 32, 1)).run(inputs)[1].reshape(n, 4, C)


def made_up(lines: list[Conversation], seed: int = 5) -> Features:
    """Conversations with random states."""
    starts = np.cumsum([0, *(len(line.ids) for line in lines)])
    return Features(lines, starts, np.random.default_rng(seed).standard_normal((starts[-1], 4, C)).astype(np.float16))


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


def test_prompts_near_those_held_back_are_not_taken() -> None:
    prompts = Prompts(prompts_of("chat"))
    assert not prompts.take("Who was Marie Curie?")
    assert not prompts.take("What should I see in Lisbon in three days?")
    assert not prompts.take("how can I save money on my water bill")
    assert not prompts.take("Hello!"), "too short to say anything"
    assert prompts.take("Who was Alan Turing, and what did he do?")
    assert not prompts.take("what did he do, and who was Alan Turing"), "it was there before"


def test_answers_come_with_their_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted, it goes on: what is there stays. A state of the last norm tells the token that
    came next.
    """
    monkeypatch.setattr(corpus, "WRITTEN", 0.0)
    monkeypatch.setattr(corpus, "BATCH", 4)
    model = str(toy.write_model(tmp_path / "tiny.gguf"))
    lines_of, states = tmp_path / "corpus.jsonl", tmp_path / "states.f16"
    generate(model, lines_of, states, Order(4, 8, 3, 1, 200))
    before = lines_of.read_text()
    with states.open("ab") as file:
        file.write(b"half of a line")
    generate(model, lines_of, states, Order(6, 8, 3, 1, 200))
    assert lines_of.read_text().startswith(before)
    lines = list(read_corpus(lines_of))
    assert len({line.prompt for line in lines}) == 6
    assert states.stat().st_size == sum(len(line.ids) for line in lines) * 4 * 64 * 2
    tiny, data, n_right, n_all = Target.load(model), open_features(lines, states, 64), 0, 0
    for line, start in zip(data.lines, data.starts, strict=False):
        for place, own in enumerate(line.answered):
            if own and line.greedy:
                logits = tiny.head @ torch.from_numpy(data.states[start + place - 1, 3].astype(np.float32))
                n_right, n_all = n_right + (int(logits.argmax()) == line.ids[place]), n_all + 1
    assert n_right >= 0.95 * n_all > 20, "float16 turns over a few that are close"


def test_user_turn_ends_where_the_words_begin(tmp_path: Path) -> None:
    with LLM(str(toy.write_model(tmp_path / "tiny.gguf")), threads=1, backend="reference", draft="off") as llm:
        text = llm.chat_prompt([{"role": "user", "content": "Why"}])[0]
        assert llm.get_tokenizer().decode(user_turn(llm)) == text[: text.index("Why")]


def test_what_is_kept_agrees_with_transformers(target: Target, states: NDArray[np.float32]) -> None:
    logits = golden("llama")[2]
    final = torch.from_numpy(states[:, 3])
    np.testing.assert_allclose(final @ target.head.T, logits, rtol=0, atol=1e-4 * np.abs(logits).max())


def test_head_that_is_the_last_layer_agrees_with_transformers(target: Target, states: NDArray[np.float32]) -> None:
    """With the last layer's input as its feature and no eye for the embedding, the head is the
    target's last layer.
    """
    assert feature_layers(3) == (1, 2, 1)
    head, last = new_head(target, conversations(8), V, None), target.last
    head.d2t, head.output = torch.zeros(V, dtype=torch.long), target.head
    blind = torch.cat((torch.zeros_like(last["qkv"]), last["qkv"]), 1)  # [q, k and v, 2C]
    gate, up = last["gate_up"].chunk(2)
    layer = "midlayer."
    given = {
        "fc.weight": torch.eye(C, 3 * C).roll(C, 1),  # the second feature enters the last layer
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
    features = torch.from_numpy(states[None, :, :3]).flatten(2)
    [made] = head.unroll(features, torch.tensor([[*IDS[1:], 5]]), 1)
    logits = golden("llama")[2]
    np.testing.assert_allclose(head.logits(made)[0].detach(), logits, rtol=0, atol=1e-4 * np.abs(logits).max())


def test_unrolled_steps_are_what_guessing_one_at_a_time_gives(target: Target, states: NDArray[np.float32]) -> None:
    torch.manual_seed(1)
    head = new_head(target, conversations(8), DRAFT, None)
    features = torch.from_numpy(states[:, :3]).flatten(1)
    for end in (1, 7, 20):
        known = torch.tensor(IDS[: end + 1])
        guesses = head.guess(features[:end], known, 4)
        assert all(head.t2d[guess] for guess in guesses)
        ids = torch.tensor([[*IDS[1 : end + 1], *guesses[:3]]])
        steps = head.unroll(features[None, :end], ids, 4)
        assert [int(head.draft_ids[head.logits(x)[0, -1].argmax()]) for x in steps] == guesses


def test_loss_is_the_cross_entropy_and_its_gradient() -> None:
    """Against PyTorch's own, whose logits are whole."""
    torch.manual_seed(4)
    n, output, final = torch.randn(300, C, requires_grad=True), torch.randn(DRAFT, C), torch.randn(300, C)
    p = (final @ output.T).softmax(-1)
    expected = torch.nn.functional.cross_entropy(n @ output.T, p, reduction="sum")
    [gradient] = torch.autograd.grad(expected, n)
    loss = Loss.apply(n, p @ output, output)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(3 * loss, n), (3 * gradient,), atol=1e-4, rtol=1e-4)


def test_loss_falls_and_guesses_come_true(target: Target) -> None:
    torch.manual_seed(2)
    lines = conversations(40)
    data = made_up(lines)
    head = new_head(target, lines, DRAFT, None)
    # a target that can be learned: of each token what its own text goes on with
    head.output = torch.randn(DRAFT, C)
    following = torch.zeros(V, C)
    following[torch.arange(DRAFT)] = 40 * torch.nn.functional.normalize(head.output[(torch.arange(DRAFT) + 7) % DRAFT])
    head.output_16 = head.output.bfloat16()
    states = np.array(data.states)
    states[:, 3] = following[[token for line in lines for token in line.ids]]
    data = type(data)(data.lines, data.starts, states)
    before, losses, plan = (
        measure(head, data, list(range(40)), 3),
        list[float](),
        Plan(60, batches=150, tokens=256, rate=1e-2),
    )
    losses.append(step_loss(head, next(batches(head, data, list(range(40)), plan)), 3).item())
    train(head, data, list(range(40)), plan, lambda _, __, x: losses.append(x))
    after = measure(head, data, list(range(40)), 3)
    assert losses[-1] < 0.5 * losses[0]
    assert after.length > 3 > before.length


def test_file_has_the_published_layout(target: Target, states: NDArray[np.float32], tmp_path: Path) -> None:
    head = new_head(target, conversations(40), DRAFT, 4)
    ids = torch.tensor(IDS[:6])
    features = torch.from_numpy(states[:5, :3]).flatten(1)
    old = head.unroll(features[None], ids[None, 1:], 1)[0].detach()
    # which training does; neither what the head computes nor the file shows it
    head.rescale(0.1 + torch.rand(3 * C))
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
        # 4 KV heads of 12, where the target has 2
        attention + "k_proj.weight": ((C, 2 * C), "float16"),
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


def test_start_is_the_best_linear_guess(target: Target) -> None:
    """Where the final state is linear in the features and the next embedding, the head begins by
    knowing it.
    """
    torch.manual_seed(3)
    rng = np.random.default_rng(3)
    lines = [Conversation(list(map(int, rng.integers(0, V, 60))), [True] * 60, True) for _ in range(40)]
    data = made_up(lines)
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
