"""The GPT example's run in PyTorch: the same start, the same batches, the same optimizer.

    gpt export --to start --batches 1000 --preset gpt2 --tokenizer gpt2 --data TEXT --out run ...
    python torch_gpt.py start curve.tsv --precision amp
    gpt train --resume --out run

Prints tokens a second and peak memory, and writes the mean loss of every ten steps. Precisions: `amp`, bf16
by torch.autocast over f32 parameters; `tf32`; `bf16`, parameters and moments too.
"""

import argparse
import json
import struct
import time
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

INTERVAL = 10
# Steps that are not counted in the speed: compilation, warm-up of the allocator.
WARM_UP = 100


def read_safetensors(path):
    """Tensors by name; the format is a length, a header in JSON and the data."""
    raw = bytearray(path.read_bytes())
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    dtypes = {"F32": torch.float32, "I32": torch.int32}
    data = memoryview(raw)[8 + length :]
    return {
        name: torch.frombuffer(data[slice(*entry["data_offsets"])], dtype=dtypes[entry["dtype"]]).view(entry["shape"])
        for name, entry in header.items()
    }


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        batch, length, width = x.shape
        split = lambda y: y.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
        q, k, v = (split(layer(x)) for layer in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(y.transpose(1, 2).reshape(batch, length, width))


class FeedForward(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear_inner = nn.Linear(width, 4 * width)
        self.linear_outer = nn.Linear(4 * width, width)

    def forward(self, x):
        return self.linear_outer(F.gelu(self.linear_inner(x)))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.mha, self.pwff = Attention(width, heads), FeedForward(width)
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x):
        # Burn numbers the norms of pre-norm blocks the other way around.
        x = x + self.mha(self.norm_2(x))
        return x + self.pwff(self.norm_1(x))


class Gpt(nn.Module):
    def __init__(self, layers, width, heads, context, vocabulary, **_):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleDict({"layers": nn.ModuleList(Block(width, heads) for _ in range(layers))})
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks["layers"]:
            x = block(x)
        return self.head(self.norm(x))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("start", type=Path, help="what `gpt export` wrote")
    parser.add_argument("out", type=Path, help="TSV of losses, appended to")
    parser.add_argument("--precision", choices=["amp", "tf32", "bf16"], default="amp")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, help="at most")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True

    run = json.loads((args.start / "run.json").read_text())
    settings, rates = run["settings"], run["learning_rates"][: args.steps]
    model = Gpt(**settings["model"])
    model.load_state_dict(read_safetensors(args.start / "model.safetensors"))
    model = model.to(args.device, torch.bfloat16 if args.precision == "bf16" else torch.float32)
    batches = read_safetensors(args.start / "batches.safetensors")

    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": settings["weight_decay"]},
            {"params": others, "weight_decay": 0.0},
        ],
        betas=tuple(run["adamw"]["betas"]),
        eps=run["adamw"]["epsilon"],
        fused=args.device == "cuda",
    )
    forward = torch.compile(model) if args.compile else model
    accumulate = settings["accumulate"]
    tokens = accumulate * batches["inputs"][0].numel()
    is_cuda = args.device == "cuda"

    losses, means, started = [], [], None
    for step, rate in enumerate(rates):
        if step == WARM_UP:
            if is_cuda:
                torch.cuda.synchronize()
            started = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = rate
        total = 0.0
        for micro in range(accumulate):
            index = step * accumulate + micro
            ids, targets = (batches[name][index].to(args.device).long() for name in ("inputs", "targets"))
            with torch.autocast(args.device, torch.bfloat16, enabled=args.precision == "amp"):
                logits = forward(ids)
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            (loss / accumulate).backward()
            total = total + loss.detach() / accumulate
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings["clip"])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        if len(losses) == INTERVAL:
            means.append((step + 1, torch.stack(losses).mean().item()))
            losses = []
    if is_cuda:
        torch.cuda.synchronize()

    name = f"torch {torch.__version__} {args.precision}" + (" compiled" if args.compile else "")
    with args.out.open("a") as out:
        for step, loss in means:
            out.write(f"{name}\t{step}\t{loss:.6f}\n")
    if started is not None:
        speed = tokens * (len(rates) - WARM_UP) / (time.perf_counter() - started)
        print(f"{name}: {speed:.0f} tokens/s after step {WARM_UP}")
    if is_cuda:
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        print(f"{name}: peak {allocated / 2**30:.2f} GiB allocated, {reserved / 2**30:.2f} GiB reserved")
    print(f"{name}: loss {means[-1][1]:.4f} over the last {INTERVAL} steps" if means else "too few steps")


if __name__ == "__main__":
    main()
