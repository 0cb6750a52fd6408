"""GPT-2's text, token by token, in PyTorch as its best users write it: weights in 16 bits, a static cache, a token's
work compiled into a CUDA graph. Greedy, one prompt, as `gpt generate --temperature 0` of Blackburn.

    python3 torch_generate.py --commit abc1234 --note "driver 580.159.04"

Weights are random: they do not change what is computed. The token is fetched each time, as whoever prints it does.
"""

import argparse
import datetime
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

LAYERS, WIDTH, HEADS, CONTEXT, VOCABULARY = 12, 768, 12, 1024, 50257


class Block(nn.Module):
    def __init__(self, batch, dtype, device):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        shape = (2, batch, HEADS, CONTEXT, WIDTH // HEADS)
        self.register_buffer("cache", torch.zeros(shape, dtype=dtype, device=device))

    def forward(self, x, position, visible):
        batch = x.shape[0]
        q, k, v = self.qkv(self.norm1(x)).view(batch, 1, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        self.cache[0].index_copy_(2, position, k)
        self.cache[1].index_copy_(2, position, v)
        y = F.scaled_dot_product_attention(q, self.cache[0], self.cache[1], attn_mask=visible)
        x = x + self.out(y.transpose(1, 2).reshape(batch, 1, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, batch, dtype, device):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block(batch, dtype, device) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("places", torch.arange(CONTEXT, device=device))

    def forward(self, token, position):
        x = self.tokens(token) + self.positions(position)
        visible = (self.places <= position).view(1, 1, 1, CONTEXT)
        for block in self.blocks:
            x = block(x, position, visible)
        return self.head(self.norm(x)).argmax(-1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1, help="prompts")
    parser.add_argument("--tokens", type=int, default=900)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--date", default=str(datetime.date.today()))
    parser.add_argument("--commit", default="-")
    parser.add_argument("--note", default="")
    args = parser.parse_args()
    device, dtype = torch.device("cuda"), torch.bfloat16
    with torch.inference_mode():
        model = Gpt(args.batch, dtype, device).to(device, dtype).eval()
        step = torch.compile(model, mode="reduce-overhead", fullgraph=True)

        def generate(count):
            token = torch.zeros(args.batch, 1, dtype=torch.long, device=device)
            position = torch.zeros(1, dtype=torch.long, device=device)
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                token = step(token, position).clone()
                position += 1
                token.tolist()
            return count * args.batch / (time.perf_counter() - start)

        generate(20)
        speeds = sorted(generate(args.tokens) for _ in range(args.rounds))
    speed = statistics.median(speeds)
    how = f"static cache of {CONTEXT}, reduce-overhead (a CUDA graph), greedy, weights in bf16"
    times = "\t".join(f"{1e3 * args.batch / s:.4f}" for s in (speed, speeds[-1], speeds[0]))
    row = [args.date, args.commit, "gpt2", "generate", "bf16", f"B{args.batch}", "torch-compile", times]
    print(*row, f"{speed:.1f}", "tokens/s", f"{torch.__version__}; {how}; {args.note}", sep="\t")


if __name__ == "__main__":
    main()
