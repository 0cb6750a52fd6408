"""PyTorch's side of decoding: one new token over caches of 8192 keys, eight sequences of 32 heads, eight of keys.

    python3 torch_decode.py --date 2026-01-31 --commit abc1234 --note "driver ..."

Backends of `scaled_dot_product_attention` with shared heads, and `flex_attention` compiled, which divides the keys among
blocks. Prints a row of benches/results for the fastest of each type; on standard error what each of them takes. Timed as
attention_sweep's peers are.
"""

import argparse
import sys
import warnings

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from torch_attention import BACKENDS, measure

BATCH, HEADS, SHARED, KEYS, DIM = 8, 32, 8, 8192, 128


def ways(q, k, v):
    """What attends, by name."""

    def by(choice):
        def run():
            with sdpa_kernel(choice):
                return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

        return run

    flex = torch.compile(flex_attention, dynamic=False)
    named = BACKENDS | {"math": SDPBackend.MATH}
    return {name: by(choice) for name, choice in named.items()} | {"flex": lambda: flex(q, k, v, enable_gqa=True)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--date", default="-")
    parser.add_argument("--commit", default="-")
    parser.add_argument("--note", default="")
    args = parser.parse_args()
    # Why backends refuse is told by their errors, too.
    warnings.filterwarnings("ignore")
    for kind, dtype in (("f32", torch.float32), ("f16", torch.float16), ("bf16", torch.bfloat16)):
        q = torch.randn(BATCH, HEADS, 1, DIM, device="cuda", dtype=dtype)
        k, v = (torch.randn(BATCH, SHARED, KEYS, DIM, device="cuda", dtype=dtype) for _ in range(2))
        found = {}
        for name, run in ways(q, k, v).items():
            try:
                with torch.no_grad():
                    found[name] = measure(run)
            except Exception as error:  # Each backend refuses in its own way.
                print(f"# {kind}: {name}: {str(error).splitlines()[0]}", file=sys.stderr)
        for name, (median, *_) in found.items():
            print(f"# {kind}: {name}: {median:.4f} ms", file=sys.stderr)
        best = min(found, key=lambda name: found[name][0])
        median, least, most = found[best]
        rate = 2 * k.numel() * k.element_size() / median / 1e6
        print(
            f"{args.date}\t{args.commit}\tattention\tdecode\t{kind}\tB{BATCH}H{HEADS}Q1K{KEYS}D{DIM} kv{SHARED}\ttorch"
            f"\t{median:.4f}\t{least:.4f}\t{most:.4f}\t{rate:.0f}\tGB/s\t{best}, keys and values read, all of a length that"
            f" the host knows; {args.note}",
            flush=True,
        )


main()
