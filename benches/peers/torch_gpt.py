"""GPT-2 in PyTorch as its best user writes it: one layer for q, k and v, the vocabulary padded to 50304,
forward pass and loss compiled, AdamW fused.

Speed, on random tokens; prints a row of benches/results for each batch size:

    python3 torch_gpt.py --batch 8,64 --date 2026-11-22 --commit abc1234 --note "driver 580.159.04"
    python3 torch_gpt.py --batch 8,64 --precision bf16 ...

Training beside the GPT example, GPT-2 or a Llama, from its start and on its batches; writes the mean loss of every
ten steps:

    gpt export --to start --batches 1000 --preset gpt2 --tokenizer gpt2 --data TEXT --out run ...
    python3 torch_gpt.py --start start --curve curve.tsv --precision amp
    gpt train --resume --out run

Precisions: `amp`, bf16 by torch.autocast over f32 parameters; `bf16`, parameters and moments too; `tf32`.
"""

import argparse
import datetime
import gc
import json
import statistics
import struct
import time
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCABULARY, PADDED = 50257, 50304
INTERVAL = 10


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


def fuse_qkv(tensors):
    """What Burn has as `query`, `key` and `value` becomes one layer, `qkv`."""
    fused = {name: value for name, value in tensors.items() if ".query." not in name}
    for name in tensors:
        if ".query." in name:
            parts = [name.replace(".query.", f".{part}.") for part in ("query", "key", "value")]
            fused[name.replace(".query.", ".qkv.")] = torch.cat([tensors[part] for part in parts])
            for part in parts[1:]:
                fused.pop(part)
    return fused


class Attention(nn.Module):
    def __init__(self, width, heads, dropout=0.0):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        return self.output(y.transpose(1, 2).reshape(batch, length, width))


class FeedForward(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear_inner = nn.Linear(width, 4 * width)
        self.linear_outer = nn.Linear(4 * width, width)

    def forward(self, x):
        return self.linear_outer(F.gelu(self.linear_inner(x)))


class Block(nn.Module):
    def __init__(self, width, heads, dropout=0.0):
        super().__init__()
        self.mha, self.pwff = Attention(width, heads, dropout), FeedForward(width)
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        # Burn numbers the norms of pre-norm blocks the other way around.
        x = x + self.dropout(self.mha(self.norm_2(x)))
        return x + self.dropout(self.pwff(self.norm_1(x)))


class Gpt(nn.Module):
    def __init__(self, layers, width, heads, context, vocabulary, dropout=0.0, **_):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleDict({"layers": nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))})
        self.dropout = nn.Dropout(dropout)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids):
        x = self.dropout(self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device)))
        for block in self.blocks["layers"]:
            x = block(x)
        return self.head(self.norm(x))


class Training:
    """A model with its optimizer, and a step of both."""

    def __init__(self, model, args, decay=0.1, betas=(0.9, 0.95), epsilon=1e-8, clip=None):
        dtype = torch.bfloat16 if args.precision == "bf16" else torch.float32
        self.model, self.clip = model.to(args.device, dtype), clip
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}],
            lr=6e-4,
            betas=betas,
            eps=epsilon,
            fused=args.device == "cuda",
        )

        model, device, mixed = self.model, args.device, args.precision == "amp"

        def loss(inputs, targets):
            with torch.autocast(device, torch.bfloat16, enabled=mixed):
                outputs = model(inputs)
                # Of a model that gives its loss itself.
                if targets is None:
                    return outputs
                if targets.is_floating_point():
                    return F.mse_loss(outputs.float(), targets.float())
                return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())

        mode = {} if args.mode == "default" else {"mode": args.mode}
        self.loss = loss if args.mode == "eager" else torch.compile(loss, **mode)

    def step(self, batches):
        total = 0.0
        for inputs, targets in batches:
            loss = self.loss(inputs, targets)
            (loss / len(batches)).backward()
            total = total + loss.detach() / len(batches)
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total


def wait(args):
    if args.device == "cuda":
        torch.cuda.synchronize()


def timed(step, args):
    """Seconds of the first step, and of a step in each round: one wait a round."""
    begin = time.perf_counter()
    step()
    wait(args)
    first = time.perf_counter() - begin
    for _ in range(INTERVAL):
        step()
    times = []
    for _ in range(args.rounds):
        wait(args)
        begin = time.perf_counter()
        for _ in range(args.steps):
            step()
        wait(args)
        times.append((time.perf_counter() - begin) / args.steps)
    return first, times


def print_row(args, op, shape, items, unit, notes, first, times, padded=False):
    """A row of benches/results."""
    if args.precision == "bf16":
        shape += " bf16 parameters"
    if padded:
        shape += " padded vocabulary"
    if args.dropout:
        shape += " dropout"
        notes = [*notes, f"dropout {args.dropout}"]
    notes = [
        torch.__version__,
        {"amp": "AMP, f32 masters", "bf16": "parameters and moments in bf16", "tf32": "f32 with TF32"}[args.precision],
        *notes,
        f"first step {first:.1f} s",
    ]
    if args.device == "cuda":
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        notes.append(f"peak {allocated / 2**30:.2f} GiB, {reserved / 2**30:.2f} reserved")
    median = statistics.median(times)
    print(
        args.date,
        args.commit,
        op,
        "step",
        "f32" if args.precision == "tf32" else "bf16",
        shape,
        "torch" if args.mode == "eager" else "torch-compile",
        *(f"{1e3 * value:.3f}" for value in (median, min(times), max(times))),
        f"{items / median:.0f}",
        unit,
        "; ".join(notes + ([args.note] if args.note else [])),
        sep="\t",
        flush=True,
    )


def forget(args):
    """What an earlier measurement compiled and allocated."""
    torch.compiler.reset()
    gc.collect()
    if args.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def measure(args, batch):
    torch.manual_seed(0)
    forget(args)
    model = Gpt(args.layers, args.width, args.heads, args.context, args.vocabulary, args.dropout)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    training = Training(model, args, clip=args.clip)
    size = (batch, args.context)
    data = [tuple(torch.randint(0, VOCABULARY, size, device=args.device) for _ in range(2))]
    first, times = timed(lambda: training.step(data), args)
    shape = f"B{batch}T{args.context}"
    padded = args.vocabulary != VOCABULARY and not args.padded_alike
    notes = [
        f"vocabulary {args.vocabulary}, q, k and v fused, {args.mode}, random tokens",
        f"clipped at {args.clip}" if args.clip else "no clipping",
    ]
    print_row(args, "gpt2", shape, batch * args.context, "tokens/s", notes, first, times, padded)


def restored(sizes, tensors):
    """The run's model with its parameters."""
    if sizes["family"] == "gpt2":
        model = Gpt(**sizes)
        model.load_state_dict(fuse_qkv(tensors))
        return model
    from torch_models import Llama

    names = {"attention.": "", "gate_and_up.linear_inner": "gate", "gate_and_up.linear_outer": "up"}

    def renamed(name):
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        return name

    tensors = {renamed(name): tensor for name, tensor in tensors.items()}
    model = Llama(
        sizes["layers"],
        sizes["width"],
        count=sizes["heads"],
        shared=sizes["kv_heads"],
        hidden=tensors["layers.0.gate.weight"].shape[0],
        length=sizes["context"],
        vocabulary=sizes["vocabulary"],
    )
    model.load_state_dict(tensors)
    return model


def train(args):
    """The example's run: writes its losses, and prints the speed after the first hundred steps."""
    run = json.loads((args.start / "run.json").read_text())
    settings, rates = run["settings"], run["learning_rates"][: args.steps or None]
    model = restored(settings["model"], read_safetensors(args.start / "model.safetensors"))
    training = Training(
        model,
        args,
        decay=settings["weight_decay"],
        betas=tuple(run["adamw"]["betas"]),
        epsilon=run["adamw"]["epsilon"],
        clip=settings["clip"],
    )
    batches = read_safetensors(args.start / "batches.safetensors")
    accumulate = settings["accumulate"]
    warm_up, losses, means, started = 100, [], [], None
    for step, rate in enumerate(rates):
        if step == warm_up:
            wait(args)
            started = time.perf_counter()
        for group in training.optimizer.param_groups:
            group["lr"] = rate
        indices = range(step * accumulate, (step + 1) * accumulate)
        load = lambda name, index: batches[name][index].to(args.device).long()
        losses.append(training.step([(load("inputs", i), load("targets", i)) for i in indices]))
        if len(losses) == INTERVAL:
            means.append((step + 1, torch.stack(losses).mean().item()))
            losses = []
    wait(args)

    name = f"torch {torch.__version__} {args.precision}" + ("" if args.mode == "eager" else " compiled")
    with args.curve.open("a") as out:
        for step, loss in means:
            out.write(f"{name}\t{step}\t{loss:.6f}\n")
    if started is not None:
        tokens = accumulate * batches["inputs"][0].numel() * (len(rates) - warm_up)
        print(f"{name}: {tokens / (time.perf_counter() - started):.0f} tokens/s after step {warm_up}")
    print(f"{name}: loss {means[-1][1]:.4f} over the last {INTERVAL} steps" if means else "too few steps")


def add_options(parser):
    parser.add_argument("--precision", choices=["amp", "bf16", "tf32"], default="amp")
    parser.add_argument("--mode", default="default", help="of torch.compile, or `eager`")
    parser.add_argument("--batch", default="8", help="items a step; several, separated by commas, in turn")
    parser.add_argument("--steps", type=int, help="of a round (20), or of a run at most")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dropout", type=float, default=0.0, help="share of activations that transformers leave out")
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    parser.add_argument("--commit", default="-", help="of this repository")
    parser.add_argument("--note", default="", help="driver, machine")
    parser.add_argument("--device", default="cuda")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--vocabulary", type=int, default=PADDED, help="%(default)s by default, as users pad it")
    parser.add_argument("--padded-alike", action="store_true", help="Blackburn's side pads its vocabulary too")
    parser.add_argument("--clip", type=float, help="largest global norm of the gradients")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--start", type=Path, help="what `gpt export` wrote")
    parser.add_argument("--curve", type=Path, help="TSV of losses, appended to")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    if args.start:
        if not args.curve:
            parser.error("--start needs --curve")
        return train(args)
    args.steps = args.steps or 20
    for batch in args.batch.split(","):
        measure(args, int(batch))


if __name__ == "__main__":
    main()
