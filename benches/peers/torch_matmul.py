"""PyTorch's side of the matrix products: the shapes that `matmul_sweep --list` prints.

    matmul_sweep --list --shapes gpt2,squares > shapes.tsv
    python3 torch_matmul.py bf16 shapes.tsv > torch.tsv

Types: bf16, f16, tf32, f32, e4m3 (scaled, fast accumulation; `e4m3-slow` without it, NT only).
Timed as Blackburn's side is: median of 15 batches of launches, one wait a batch.
"""

import math
import statistics
import sys
import time

import torch


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


def operand(batch, rows, columns, letter, dtype):
    shape = (batch, rows, columns) if letter == "N" else (batch, columns, rows)
    x = torch.randn(shape, device="cuda", dtype=dtype)
    x = x if letter == "N" else x.transpose(1, 2)
    return x[0] if batch == 1 else x


def product(kind, batch, m, k, n, layout):
    if kind.startswith("e4m3"):
        if layout != "NT" or batch != 1 or k % 16 or n % 16:
            return None
        one = torch.ones((), device="cuda")
        a = torch.randn(m, k, device="cuda").to(torch.float8_e4m3fn)
        b = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn).t()
        fast = not kind.endswith("slow")
        return lambda: torch._scaled_mm(
            a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast
        )
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16}.get(kind, torch.float32)
    a = operand(batch, m, k, layout[0], dtype)
    b = operand(batch, k, n, layout[1], dtype)
    return lambda: a @ b


def main():
    kind, shapes = sys.argv[1:3]
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
    print(f"# torch {torch.__version__}, CUDA {torch.version.cuda}, {torch.cuda.get_device_name()}")
    print("dtype\tname\tshape\tlayout\tmedian_ms\tmin_ms\tmax_ms\tTFLOP/s")
    for line in open(shapes):
        name, *sizes, layout = line.rstrip("\n").split("\t")
        batch, m, k, n = map(int, sizes)
        run = product(kind, batch, m, k, n, layout)
        if run is None:
            continue
        median, least, most = measure(run)
        rate = 2 * batch * m * k * n / median / 1e9
        print(
            f"{kind}\t{name}\t{m}x{k}x{n}\t{layout}\t{median:.4f}\t{least:.4f}\t{most:.4f}\t{rate:.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
