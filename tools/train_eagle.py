"""Train an EAGLE-3 head for a model, from the model's own answers, on a CPU.

    pip install -e .[oracle]        # torch
    python tools/train_eagle.py MODEL OUT --work DIR --prompts 1500 --minutes 40
    martlet chat MODEL --draft eagle=OUT

Three stages, each of which goes on where it was interrupted: the model answers generated chat
prompts (DIR/corpus.jsonl); its hidden states at every token of those are computed (DIR/states.f16,
4 * hidden * 2 bytes a token); a head is trained on them and written to OUT (config.json,
model.safetensors) every few minutes, with its acceptance on conversations that it never saw.
`tools/eagle/` has the parts; begin with `prompts.py`. MODEL is a GGUF file or a Hugging Face folder
of llama's shape.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

import torch
from eagle.corpus import Conversation, Features, Order, generate, open_features, read_corpus
from eagle.head import Head, HeadConfig, load_head, save_head
from eagle.recorder import feature_layers
from eagle.start import fit_start
from eagle.target import Target
from eagle.training import Plan, measure, train

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
from speculation import prompts_of

# one conversation in so many is never trained on, and of those so many are measured
HELD_OUT, MEASURED = 20, 120


def main() -> None:
    """Run the stages."""
    args = _arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.work.mkdir(parents=True, exist_ok=True)
    corpus, states = args.work / "corpus.jsonl", args.work / "states.f16"
    order = Order(args.prompts, args.tokens, args.seed, args.threads, held_back=prompts_of("chat"))
    generate(args.model, corpus, states, order)
    target = Target.load(args.model)
    data = open_features(list(read_corpus(corpus))[: args.prompts], states, target.spec.hidden)
    training = [i for i in range(len(data.lines)) if i % HELD_OUT]
    held_out = [i for i in range(len(data.lines)) if i % HELD_OUT == 0][:MEASURED]
    head = new_head(target, [data.lines[i] for i in training], args.draft_vocab, args.kv_heads)
    if args.resume is None:
        fit_start(head, target, data, training)
    else:
        # of which nothing but these two knows the draft vocabulary
        known = load_head(args.resume, target).state_dict()
        head.load_state_dict({**known, "d2t": head.d2t, "t2d": head.t2d})
    _train(head, data, training, held_out, args)


def new_head(target: Target, lines: list[Conversation], draft_vocab: int, kv_heads: int | None) -> Head:
    """A head that has the commonest tokens of the answers as its draft vocabulary; random
    otherwise.
    """
    counts = Counter(token for line in lines for token, own in zip(line.ids, line.answered, strict=True) if own)
    common = sorted(token for token, _ in counts.most_common(draft_vocab))
    spec, attention = target.spec, target.attention
    config = HeadConfig(
        hidden_size=spec.hidden,
        intermediate_size=spec.layers[-1].ffn.ffn_hidden,
        num_attention_heads=attention.n_heads,
        num_key_value_heads=kv_heads or attention.n_kv_heads,
        head_dim=attention.head_dim,
        vocab_size=spec.vocab,
        draft_vocab_size=len(common),
        rms_norm_eps=target.eps,
        rope_theta=target.rope_theta,
        max_position_embeddings=spec.context,
        eagle_aux_hidden_state_layer_ids=feature_layers(len(spec.layers)),
    )
    return Head(config, target, torch.tensor(common))


def _train(head: Head, data: Features, training: list[int], held_out: list[int], args: argparse.Namespace) -> None:
    n_tokens = sum(sum(data.lines[i].answered) for i in training)
    covered = [
        bool(head.t2d[token])
        for i in held_out
        for token, own in zip(data.lines[i].ids, data.lines[i].answered, strict=True)
        if own
    ]
    print(
        f"train: {len(training)} conversations, {n_tokens} tokens answered; {sum(p.numel() for p in head.parameters())} parameters;"
        f" the draft vocabulary has {len(head.d2t)} tokens, {sum(covered) / len(covered):.4f} of what is answered held out"
    )

    def report(step: int, tokens: int, loss: float) -> None:
        found = {
            name: measure(head, data, [i for i in held_out if data.lines[i].written is own])
            for name, own in (("prompts of the model's own", True), ("prompts of templates", False))
        }
        accepted = "; ".join(f"{name}: {acceptance}" for name, acceptance in found.items())
        print(
            f"train: step {step}, {tokens} tokens, loss {loss:.3f}; accepted of guesses 1, 2, …, {accepted}", flush=True
        )
        chances = {name: acceptance.chances for name, acceptance in found.items()}
        save_head(head, args.out, {"tokens": tokens, "loss": round(loss, 4), "acceptance": chances})

    report(0, 0, float("nan"))
    plan = Plan(
        args.minutes,
        steps=args.steps,
        rate=args.rate,
        sharpness=args.sharpness,
        report_minutes=args.report,
        seed=args.seed,
    )
    train(head, data, training, plan, report)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="GGUF file or Hugging Face folder")
    parser.add_argument("out", type=Path, help="folder of the head")
    parser.add_argument("--work", type=Path, required=True, help="folder of what is made on the way")
    parser.add_argument("--prompts", type=int, default=3000, help="conversations")
    parser.add_argument("--tokens", type=int, default=320, help="most of an answer")
    parser.add_argument("--draft-vocab", type=int, default=8192, help="tokens that the head can guess")
    parser.add_argument("--kv-heads", type=int, help="of the head; default: as many as the target has")
    parser.add_argument("--minutes", type=float, default=40, help="of training")
    parser.add_argument("--steps", type=int, default=3, help="draft steps unrolled in training")
    parser.add_argument("--rate", type=float, default=5e-4, help="the highest learning rate")
    parser.add_argument("--sharpness", type=float, default=1.0, help="above 1: learn more of the likeliest tokens")
    parser.add_argument(
        "--report", type=float, default=5, help="minutes between measurements, each of which writes OUT"
    )
    parser.add_argument("--resume", type=Path, help="a head of the same shape to go on from")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=7)
    return parser.parse_args()


if __name__ == "__main__":
    main()
