"""PyTorch's side of attention: `scaled_dot_product_attention` by each of its backends.

    python3 torch_attention.py bf16 8192 > torch.tsv              # up to 8192 tokens
    python3 torch_attention.py bf16 8192 cudnn,flash > torch.tsv  # by these backends
    python3 torch_attention.py bf16 16384 cudnn 16384             # from 16384 tokens on
    python3 torch_attention.py bf16 16384 cudnn 1024 64,256       # heads of these sizes

The cases are those of attention_sweep, which times the passes one by one; `Both` is forward and backward.
Timed as Blackburn's side is: median of 15 batches of launches, one wait a batch.
"""

import math
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def batch_ms(run, launches):
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(launches):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3 / launches


def measure(run):
    batch_ms(run, 3)
    launches = min(200, max(1, math.ceil(8.0 / batch_ms(run, 5))))
    times = sorted(batch_ms(run, launches) for _ in range(15))
    return statistics.median(times), times[0], times[-1]


def main():
    kind, tokens = sys.argv[1], int(sys.argv[2])
    names = sys.argv[3].split(",") if len(sys.argv) > 3 else list(BACKENDS)
    least = int(sys.argv[4]) if len(sys.argv) > 4 else 0
    dims = [int(dim) for dim in sys.argv[5].split(",")] if len(sys.argv) > 5 else [64, 128, 256]
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[kind]
    batch, heads = 4, 16
    torch.manual_seed(0)
    print(f"# torch {torch.__version__}, CUDA {torch.version.cuda}, {torch.cuda.get_device_name()}")
    print("dtype\tname\tshape\tpass\tbackend\tmedian_ms\tmin_ms\tmax_ms\tTFLOP/s\tpeak_MiB")
    for seq in (1024, 2048, 4096, 8192, 16384):
        for dim in dims:
            for causal in (False, True):
                if not least <= seq <= tokens:
                    continue
                name = f"{seq}, heads of {dim}" + (", causal" if causal else "")
                shape = f"B{batch}H{heads}Q{seq}K{seq}D{dim}" + (" causal" if causal else "")
                flops = 4.0 * batch * heads * seq * seq * dim * (0.5 if causal else 1.0)
                for backend, choice in ((name, BACKENDS[name]) for name in names):
                    draw = lambda: torch.randn(
                        batch, heads, seq, dim, device="cuda", dtype=dtype, requires_grad=True
                    )
                    q, k, v = draw(), draw(), draw()
                    dout = torch.randn_like(q)

                    def forward():
                        with sdpa_kernel(choice):
                            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

                    def inference():
                        with torch.no_grad():
                            forward()

                    def both():
                        torch.autograd.grad(forward(), (q, k, v), dout)

                    try:
                        both()
                    except RuntimeError as error:
                        print(f"# {name}: {backend}: {str(error).splitlines()[0]}")
                        continue
                    torch.cuda.reset_peak_memory_stats()
                    for what, run, factor in (("Forward", inference, 1), ("Both", both, 3.5)):
                        median, least, most = measure(run)
                        rate = factor * flops / median / 1e9
                        peak = torch.cuda.max_memory_allocated() >> 20
                        print(
                            f"{kind}\t{name}\t{shape}\t{what}\t{backend}\t{median:.4f}\t{least:.4f}"
                            f"\t{most:.4f}\t{rate:.1f}\t{peak}",
                            flush=True,
                        )


if __name__ == "__main__":
    main()
