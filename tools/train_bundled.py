"""Train the bundled model and its draft, first on plain prose, then also on stories and conversations of a program.

    python tools/train_bundled.py prepare --text prose.txt.gz --work work/
    python tools/train_bundled.py train   --work work/ --size main
    python tools/train_bundled.py train   --work work/ --size draft
    python tools/train_bundled.py stories --text prose.txt.gz --work work/
    python tools/train_bundled.py train   --work work/ --size main  --on stories --tokens 7000000
    python tools/train_bundled.py train   --work work/ --size draft --on stories --tokens 7000000
    python tools/train_bundled.py export  --work work/ --size main  --out headway/bundled/story
    python tools/train_bundled.py export  --work work/ --size draft --out headway/bundled/story-draft

The architecture is Llama's (RMSNorm, RoPE, grouped-query attention, SwiGLU, tied embeddings), so that
the export is an ordinary Hugging Face folder. Two-dimensional weights are trained with Muon, the rest
with AdamW; the rate is held constant and then decays linearly to zero over the last part of the run.
`train` writes a checkpoint every few minutes and continues from it when started again. `train --on stories` begins with
the weights of the first run, or with those of an exported folder (`--weights`).
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import stories
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCAB_SIZE = 8192
HELD_OUT_BOOKS = 3
CHAT_SHARE = 0.15
PIECE = 700  # tokens of a book in one piece, between stories
ROLES = {
    "story": "The small language model that comes with Headway.",
    "story-draft": "A draft for speculative decoding with headway/story: the same tokenizer, a tenth of the size.",
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Shape:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    context: int = 1024


SHAPES = {
    "main": Shape(hidden=384, layers=5, heads=6, kv_heads=2, head_dim=64, ffn=1024),
    "draft": Shape(hidden=96, layers=3, heads=3, kv_heads=1, head_dim=32, ffn=256),
}


# --- text -------------------------------------------------------------------------------------------


def unwrap(book: str) -> list[str]:
    """Paragraphs of a hard-wrapped book, with prose joined to one line and verse left as it is."""
    paragraphs = []
    for block in re.split(r"\n\s*\n", book):
        lines = [line.rstrip() for line in block.split("\n") if line.strip()]
        if not lines:
            continue
        is_prose = not any(line.startswith("  ") for line in lines)
        paragraphs.append(" ".join(lines) if is_prose else "\n".join(lines))
    return paragraphs


def as_chat(paragraph: str) -> str | None:
    """A paragraph as one exchange: its first sentence is the user's, the rest the assistant's."""
    sentences = re.split(r"(?<=[.!?”])\s+(?=[A-Z“])", paragraph)
    if len(sentences) < 3 or "\n" in paragraph:
        return None
    opening, rest = sentences[0], " ".join(sentences[1:])
    if not 20 <= len(opening) <= 300:
        return None
    return f"{TURN_START}user\n{opening}{TURN_END}\n{TURN_START}assistant\n{rest}{TURN_END}\n"


def book_text(book: str, rng: random.Random, chat_share: float = CHAT_SHARE) -> str:
    """A book as training text: runs of plain paragraphs with some retold as chat."""
    pieces = []
    for paragraph in unwrap(book):
        chat = as_chat(paragraph) if rng.random() < chat_share else None
        pieces.append(f"{END_OF_TEXT}{chat}{END_OF_TEXT}" if chat else paragraph + "\n\n")
    return END_OF_TEXT + "".join(pieces)


def read_books(path: Path) -> list[str]:
    """The books in the order of training; the first ones are held out."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        books = [b for b in file.read().split(END_OF_TEXT) if b.strip()]
    random.Random(0).shuffle(books)
    return books


def prepare(args: argparse.Namespace) -> None:
    rng = random.Random(0)
    texts = [book_text(book, rng) for book in read_books(args.text)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts[HELD_OUT_BOOKS:], trainer)
    args.work.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(args.work / "tokenizer.json"), pretty=False)
    for name, part in (("held_out", texts[:HELD_OUT_BOOKS]), ("train", texts[HELD_OUT_BOOKS:])):
        ids = np.concatenate([np.array(e.ids, dtype=np.uint16) for e in tokenizer.encode_batch(part)])
        np.save(args.work / f"{name}.npy", ids)
        print(f"{name}: {len(part)} books, {sum(map(len, part)):,} characters, {len(ids):,} tokens")


def told(text: list[stories.Turn] | str) -> str:
    """A text of `stories` as the chat template writes it."""
    if isinstance(text, str):
        return END_OF_TEXT + text
    return END_OF_TEXT + "".join(f"{TURN_START}{role}\n{words}{TURN_END}\n" for role, words in text)


def prepare_stories(args: argparse.Namespace) -> None:
    """Tokens of made stories and conversations, mixed with pieces of the books in their proportion."""
    tokenizer = Tokenizer.from_file(str(args.work / "tokenizer.json"))
    for name, seed, tokens in (("stories_held_out", 1, 100_000), ("stories_train", 0, args.tokens)):
        made, count = [], 0
        source = stories.texts(seed)
        while count < tokens:
            encoded = tokenizer.encode_batch([told(next(source)) for _ in range(1000)])
            made += [np.array(e.ids, dtype=np.uint16) for e in encoded]
            count += sum(len(e.ids) for e in encoded)
        if name == "stories_train":
            rng = random.Random(2)
            books = "".join(book_text(book, rng, chat_share=0.02) for book in read_books(args.text)[HELD_OUT_BOOKS:])
            ids = np.array(tokenizer.encode(books).ids, dtype=np.uint16)
            pieces = np.split(ids, range(PIECE, len(ids), PIECE))
            rng.shuffle(pieces)
            made += pieces[: round(count * args.books / (1 - args.books) / PIECE)]
            rng.shuffle(made)
        ids = np.concatenate(made)
        np.save(args.work / f"{name}.npy", ids)
        print(f"{name}: {len(ids):,} tokens")


# --- model ------------------------------------------------------------------------------------------


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE in the half-split layout of Hugging Face's Llama; x is [batch, heads, length, head_dim]."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class Layer(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.shape = s
        self.input_layernorm = nn.RMSNorm(s.hidden, eps=1e-5)
        self.post_attention_layernorm = nn.RMSNorm(s.hidden, eps=1e-5)
        self.q_proj = nn.Linear(s.hidden, s.heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(s.hidden, s.kv_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.heads * s.head_dim, s.hidden, bias=False)
        self.gate_proj = nn.Linear(s.hidden, s.ffn, bias=False)
        self.up_proj = nn.Linear(s.hidden, s.ffn, bias=False)
        self.down_proj = nn.Linear(s.ffn, s.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        s = self.shape
        batch, length, _ = x.shape
        y = self.input_layernorm(x)
        q = self.q_proj(y).view(batch, length, s.heads, s.head_dim).transpose(1, 2)
        k = self.k_proj(y).view(batch, length, s.kv_heads, s.head_dim).transpose(1, 2)
        v = self.v_proj(y).view(batch, length, s.kv_heads, s.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k.to(q.dtype), v.to(q.dtype), is_causal=True, enable_gqa=True)
        x = x + self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))
        y = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class Decoder(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.shape = s
        self.embed_tokens = nn.Embedding(VOCAB_SIZE, s.hidden)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.layers))
        self.norm = nn.RMSNorm(s.hidden, eps=1e-5)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        for layer in self.layers:
            for proj in (layer.o_proj, layer.down_proj):
                nn.init.normal_(proj.weight, std=0.02 / math.sqrt(2 * s.layers))
        inverse = 10000.0 ** (-torch.arange(0, s.head_dim, 2) / s.head_dim)
        angle = torch.outer(torch.arange(s.context), inverse)
        self.register_buffer("cos", angle.cos().to(torch.bfloat16), persistent=False)
        self.register_buffer("sin", angle.sin().to(torch.bfloat16), persistent=False)

    def loss(self, ids: Tensor) -> Tensor:
        """Mean next-token cross-entropy, in nats, of ids [batch, length + 1]."""
        x = self.embed_tokens(ids[:, :-1])
        length = x.shape[1]
        for layer in self.layers:
            x = layer(x, self.cos[:length], self.sin[:length])
        logits = F.linear(self.norm(x), self.embed_tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


# --- training ---------------------------------------------------------------------------------------


def rate_factor(progress: float, decay: float) -> float:
    """Warm up over 1 % of the run, hold, then fall linearly to zero over the last `decay` of it."""
    return min(1.0, progress / 0.01 + 0.02, max(0.0, (1.0 - progress) / decay))


@torch.no_grad()
def held_out_loss(model: Decoder, ids: np.ndarray, length: int, windows: int = 32) -> float:
    starts = np.linspace(0, len(ids) - length - 2, windows).astype(int)
    total = 0.0
    for at in range(0, windows, 8):
        batch = torch.from_numpy(np.stack([ids[s : s + length + 1] for s in starts[at : at + 8]]).astype(np.int64))
        with torch.autocast("cpu", torch.bfloat16):
            total += model.loss(batch).item() * len(batch)
    return total / windows


def document_starts(ids: np.ndarray, starts: np.ndarray, within: int) -> np.ndarray:
    """Each start, or the beginning of its document where that is less than `within` tokens before it.

    A served conversation begins at position 0, so many windows of training do too.
    """
    begins = np.flatnonzero(ids == 0) + 1
    begins = begins[np.maximum(np.searchsorted(begins, starts, side="right") - 1, 0)]
    return np.where((begins <= starts) & (starts - begins < within), begins, starts)


def save_atomically(state: object, path: Path) -> None:
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    held_out = np.load(args.work / "held_out.npy")
    data = np.load(args.work / ("stories_train.npy" if args.on == "stories" else "train.npy"))
    model = Decoder(SHAPES[args.size])
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(data):,} training tokens")
    matrices = [p for p in model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is m for m in matrices)]
    optimizers = [
        torch.optim.Muon(matrices, lr=args.muon_rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=args.adam_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]
    peaks = [o.param_groups[0]["lr"] for o in optimizers]
    checkpoint, step, before = args.work / f"{args.size}.pt", 0, 0
    if args.on == "stories":
        before = load_weights(model, checkpoint, args.weights)
        held_out_stories = np.load(args.work / "stories_held_out.npy")
        checkpoint = args.work / f"{args.size}-stories.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        step = state["step"]
    loss_fn = torch.compile(model.loss) if args.compile else model.loss
    total, micro = args.tokens // args.batch_tokens, args.batch_tokens // args.micro_tokens
    smooth, began, saved_at = None, time.monotonic(), time.monotonic()
    while step < total:
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * rate_factor(step / total, args.decay)
        length = args.length if step / total < args.long_from else model.shape.context
        starts = np.random.default_rng(step).integers(0, len(data) - length - 1, args.batch_tokens // length)
        if args.on == "stories":
            starts = document_starts(data, starts, length // 2)
        batch = torch.from_numpy(np.stack([data[s : s + length + 1] for s in starts]).astype(np.int64))
        loss_sum = 0.0
        for part in batch.chunk(micro):
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_fn(part)
            (loss / micro).backward()
            loss_sum += loss.item() / micro
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        smooth = loss_sum if smooth is None else 0.95 * smooth + 0.05 * loss_sum
        now = time.monotonic()
        if step % 10 == 0 or step == total:
            print(
                f"step {step}/{total} loss {smooth:.3f} {step * args.batch_tokens:,} tokens {now - began:.0f} s",
                flush=True,
            )
        if step == total or now - saved_at > 240:
            saved_at = now
            measured = held_out_loss(model, held_out, model.shape.context)
            print(f"  held-out loss {measured:.4f} nats a token", flush=True)
            state = {
                "model": model.state_dict(),
                "optimizers": [o.state_dict() for o in optimizers],
                "step": step,
                "tokens": before + step * args.batch_tokens,
                "held_out_loss": measured,
            }
            if args.on == "stories":
                state["story_tokens"] = step * args.batch_tokens
                state["held_out_stories"] = held_out_loss(model, held_out_stories, model.shape.context)
                print(f"  held-out loss of stories {state['held_out_stories']:.4f} nats a token", flush=True)
            save_atomically(state, checkpoint)


def load_weights(model: Decoder, checkpoint: Path, folder: Path | None) -> int:
    """Weights of the first run, from its checkpoint or from an exported folder; gives its tokens."""
    if folder is None:
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        return int(state["tokens"])
    tensors = load_file(folder / "model.safetensors")
    names = {exported: name for name in model.state_dict() for exported in hugging_face_tensors({name: torch.empty(1)})}
    model.load_state_dict({names[exported]: value.float() for exported, value in tensors.items()})
    return int(json.loads((folder / "training_report.json").read_text())["training_tokens"])


# --- export -----------------------------------------------------------------------------------------


def hugging_face_tensors(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights in bfloat16 under the names of Hugging Face's Llama."""
    names = {
        "q_proj": "self_attn",
        "k_proj": "self_attn",
        "v_proj": "self_attn",
        "o_proj": "self_attn",
        "gate_proj": "mlp",
        "up_proj": "mlp",
        "down_proj": "mlp",
    }
    tensors = {}
    for name, value in weights.items():
        parts = name.split(".")
        if parts[0] == "layers" and parts[2] in names:
            parts.insert(2, names[parts[2]])
        tensors["model." + ".".join(parts)] = value.to(torch.bfloat16).contiguous()
    return tensors


def export(args: argparse.Namespace) -> None:
    s = SHAPES[args.size]
    trained = args.work / f"{args.size}-stories.pt"
    state = torch.load(trained if trained.exists() else args.work / f"{args.size}.pt")
    tensors = hugging_face_tensors(state["model"])
    args.out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, args.out / "model.safetensors", metadata={"format": "pt"})
    (args.out / "model.safetensors").chmod(0o644)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": s.hidden,
        "intermediate_size": s.ffn,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "max_position_embeddings": s.context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    generation = {"bos_token_id": 0, "eos_token_id": [0, 2], "do_sample": True, "temperature": 0.6, "top_p": 0.9}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": TURN_END,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": s.context,
    }
    report = {
        "shape": asdict(s),
        "parameters": sum(t.numel() for t in tensors.values()),
        "training_tokens": state["tokens"],
        "story_tokens": state.get("story_tokens", 0),
        "held_out_loss_nats_per_token": round(state["held_out_loss"], 4),
        "held_out_stories_nats_per_token": round(state.get("held_out_stories", math.nan), 4),
    }
    for name, content in (
        ("config", config),
        ("generation_config", generation),
        ("tokenizer_config", tokenizer_config),
        ("training_report", report),
    ):
        (args.out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    (args.out / "tokenizer.json").write_bytes((args.work / "tokenizer.json").read_bytes())
    (args.out / "README.md").write_text(model_card(args.out.name, s, report, args.out / "model.safetensors"))
    print(json.dumps(report))


def model_card(name: str, s: Shape, report: dict[str, Any], weights: Path) -> str:
    template = Path(__file__).with_name("model_card.md").read_text()
    return template.format(
        name=name,
        role=ROLES.get(name, f"A model named {name}."),
        megabytes=weights.stat().st_size / 1e6,
        parameters=report["parameters"],
        training_tokens=report["training_tokens"],
        story_tokens=report["story_tokens"],
        held_out_loss=report["held_out_loss_nats_per_token"],
        held_out_stories=report["held_out_stories_nats_per_token"],
        **asdict(s),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, run in (("prepare", prepare), ("stories", prepare_stories), ("train", train), ("export", export)):
        command = commands.add_parser(name)
        command.set_defaults(run=run)
        command.add_argument("--work", type=Path, required=True, help="folder of tokens and checkpoints")
        if name in ("prepare", "stories"):
            command.add_argument(
                "--text", type=Path, required=True, help="gzipped prose, books separated by <|endoftext|>"
            )
        if name == "prepare":
            continue
        if name == "stories":
            command.add_argument("--tokens", type=int, default=5_000_000, help="tokens of made stories")
            command.add_argument("--books", type=float, default=0.3, help="share of the books among all tokens")
            continue
        command.add_argument("--size", choices=SHAPES, required=True)
        if name == "export":
            command.add_argument("--out", type=Path, required=True)
            continue
        command.add_argument("--on", choices=("prose", "stories"), default="prose")
        command.add_argument("--weights", type=Path, help="with --on stories: begin with this exported folder")
        command.add_argument("--tokens", type=int, default=14_000_000)
        command.add_argument("--batch-tokens", type=int, default=8192)
        command.add_argument("--micro-tokens", type=int, default=8192, help="tokens of one forward pass")
        command.add_argument("--length", type=int, default=256, help="window of the first part of the run")
        command.add_argument(
            "--long-from", type=float, default=0.85, help="progress at which windows grow to the context"
        )
        command.add_argument("--muon-rate", type=float, default=2e-3)
        command.add_argument("--adam-rate", type=float, default=2e-3)
        command.add_argument("--decay", type=float, default=0.5, help="share of the run over which the rate falls to 0")
        command.add_argument("--threads", type=int, default=2)
        command.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
