"""PyTorch's side of ops_sweep, eager, as rows for benches/results.

    ops_sweep --list > cases.tsv
    python3 torch_ops.py cases.tsv --date 2026-11-25 --commit abc1234 --note "driver ..." > torch.tsv

The list names operations, passes, types and shapes, and the bytes that each has to move. Timed as ops_sweep times:
calls in a row and one wait, medians of a few. What PyTorch does otherwise than Burn stands at the operation.
"""

import argparse
import math
import statistics
import time

import torch
import torch.nn.functional as F

DEVICE = "cuda"
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
SLOW_MS, BATCH_MS, CASE_MS, MOST_CALLS = 200.0, 6.0, 60.0, 150


def numbers(dims, dtype):
    return torch.randn(dims, device=DEVICE, dtype=dtype)


def positive(dims, dtype):
    return torch.empty(dims, device=DEVICE, dtype=dtype).uniform_(0.1, 2.0)


def mask(dims, _dtype):
    return torch.rand(dims, device=DEVICE) > 0.5


def places(dims, end):
    return torch.randint(0, end, dims, device=DEVICE)


def of_one(run, draw=numbers):
    """An operation of one tensor; `run` takes the tensor, and the dimension and the numbers that its shape names."""

    def make(dims, options, dtype):
        x = draw(dims, dtype)
        return x, lambda x: run(x, options)

    return make


def of_two(run):
    def make(dims, options, dtype):
        y = numbers(dims, dtype)
        return numbers(dims, dtype), lambda x: run(x, y)

    return make


def along(run, draw=numbers):
    return of_one(lambda x, options: run(x, options["dim"]), draw)


def window(run):
    return of_one(lambda x, options: run(x, options["kernel"], options["stride"], options["padding"]))


def interpolate(mode):
    # Burn's default puts the corners' pixels in one place.
    corners = None if mode == "nearest" else True
    return of_one(lambda x, options: F.interpolate(x, scale_factor=options["times"], mode=mode, align_corners=corners))


def gather(dims, options, dtype):
    dim = options["dim"]
    index = places(dims, dims[dim])
    return numbers(dims, dtype), lambda x: x.gather(dim, index)


def scatter(dims, options, dtype):
    dim = options["dim"]
    index, values = places(dims, dims[dim]), numbers(dims, dtype)
    return numbers(dims, dtype), lambda x: x.scatter_add(dim, index, values)


def select(dims, options, dtype):
    dim = options["dim"]
    index = places([dims[dim]], dims[dim])
    return numbers(dims, dtype), lambda x: x.index_select(dim, index)


def select_assign(dims, options, dtype):
    dim = options["dim"]
    index, values = places([dims[dim]], dims[dim]), numbers(dims, dtype)
    return numbers(dims, dtype), lambda x: x.index_add(dim, index, values)


def embedding(dims, options, dtype):
    index = places([1, dims[0]], options["words"])
    return numbers([options["words"], dims[1]], dtype), lambda table: F.embedding(index, table)


def one_hot(dims, _options, _dtype):
    return places([dims[0]], dims[1]), lambda x: F.one_hot(x, dims[1])


def mask_where(dims, _options, dtype):
    y, chosen = numbers(dims, dtype), mask(dims, dtype)
    return numbers(dims, dtype), lambda x: torch.where(chosen, y, x)


def mask_fill(dims, _options, dtype):
    chosen = mask(dims, dtype)
    return numbers(dims, dtype), lambda x: x.masked_fill(chosen, -1.0)


def halves(dims, options):
    dim = options.get("dim", 0)
    return [size // 2 if place == dim else size for place, size in enumerate(dims)]


def cat(dims, options, dtype):
    other = numbers(halves(dims, options), dtype).requires_grad_()
    return numbers(halves(dims, options), dtype), lambda x: torch.cat([x, other], options["dim"])


def stack(dims, options, dtype):
    other = numbers(halves(dims, options), dtype)
    return numbers(halves(dims, options), dtype), lambda x: torch.stack([x, other])


def repeat(dims, options, dtype):
    times = [2 if place == options["dim"] else 1 for place in range(len(dims))]
    return numbers(halves(dims, options), dtype), lambda x: x.repeat(times)


def slice_assign(dims, _options, dtype):
    values = numbers([dims[0], dims[1] // 2], dtype)
    return numbers(dims, dtype), lambda x: torch.slice_scatter(x, values, 1, 1, dims[1] // 2 + 1)


def transpose_add(dims, _options, dtype):
    y = numbers(dims[::-1], dtype)
    return numbers(dims, dtype), lambda x: x.t() + y


def expand(dims, _options, dtype):
    return numbers([1, dims[1]], dtype), lambda x: x.expand(dims) * 1.5


def random(draw):
    def make(dims, _options, dtype):
        return None, lambda _: draw(torch.empty(dims, device=DEVICE, dtype=dtype))

    return make


OPERATIONS = {
    "sum": along(lambda x, dim: x.sum(dim)),
    "mean": along(lambda x, dim: x.mean(dim)),
    "prod": along(lambda x, dim: x.prod(dim), positive),
    # The gradient of `amax` goes to all that are greatest, that of `max` to one, as Burn's does.
    "max": along(lambda x, dim: x.max(dim).values if x.requires_grad else x.amax(dim)),
    "min": along(lambda x, dim: x.amin(dim)),
    "argmax": along(lambda x, dim: x.argmax(dim)),
    "argmin": along(lambda x, dim: x.argmin(dim)),
    "var": along(lambda x, dim: x.var(dim)),
    "any": along(lambda x, dim: x.any(dim), mask),
    "all": along(lambda x, dim: x.all(dim), mask),
    "softmax": along(lambda x, dim: x.softmax(dim)),
    "log_softmax": along(lambda x, dim: x.log_softmax(dim)),
    "cumsum": along(lambda x, dim: x.cumsum(dim)),
    "cumprod": along(lambda x, dim: x.cumprod(dim)),
    "cummax": along(lambda x, dim: x.cummax(dim)),
    "sum_all": of_one(lambda x, _: x.sum()),
    "mean_all": of_one(lambda x, _: x.mean()),
    "max_all": of_one(lambda x, _: x.max()),
    "any_all": of_one(lambda x, _: x.any(), mask),
    "mse_loss": of_two(F.mse_loss),
    "sort": along(lambda x, dim: x.sort(dim).values),
    "argsort": along(lambda x, dim: x.argsort(dim)),
    "topk": of_one(lambda x, options: x.topk(options["k"], options["dim"])),
    "add_scalar": of_one(lambda x, _: x + 1.0),
    "exp": of_one(lambda x, _: x.exp()),
    "gelu": of_one(lambda x, _: F.gelu(x)),
    "sigmoid": of_one(lambda x, _: x.sigmoid()),
    "tanh": of_one(lambda x, _: x.tanh()),
    "powf": of_one(lambda x, _: x**1.7, positive),
    "clamp": of_one(lambda x, _: x.clamp(-0.5, 0.5)),
    "add": of_two(torch.add),
    "mul": of_two(torch.mul),
    "greater": of_two(torch.gt),
    "equal": of_two(torch.eq),
    "greater_scalar": of_one(lambda x, _: x > 0.5),
    "mask_where": mask_where,
    "mask_fill": mask_fill,
    "random_uniform": random(lambda x: x.uniform_(-1.0, 1.0)),
    "random_normal": random(lambda x: x.normal_()),
    "random_bernoulli": random(lambda x: x.bernoulli_(0.9)),
    "gather": gather,
    "scatter": scatter,
    "select": select,
    "select_assign": select_assign,
    "embedding": embedding,
    "one_hot": one_hot,
    "transpose": of_one(lambda x, _: x.t().contiguous()),
    "transpose_add": transpose_add,
    "permute_nhwc": of_one(lambda x, _: x.permute(0, 2, 3, 1).contiguous()),
    "permute_heads": of_one(lambda x, _: x.transpose(1, 2).contiguous()),
    "cat": cat,
    "stack": stack,
    "repeat": repeat,
    "slice": of_one(lambda x, _: x[:, 1 : x.shape[1] // 2 + 1].contiguous()),
    "slice_assign": slice_assign,
    "expand": expand,
    "flip": along(lambda x, dim: x.flip(dim)),
    "max_pool1d": window(F.max_pool1d),
    "avg_pool1d": window(F.avg_pool1d),
    "adaptive_avg_pool1d": of_one(lambda x, options: F.adaptive_avg_pool1d(x, options["to"])),
    "max_pool2d": window(F.max_pool2d),
    "avg_pool2d": window(F.avg_pool2d),
    "adaptive_avg_pool2d": of_one(lambda x, options: F.adaptive_avg_pool2d(x, options["to"])),
    "interpolate_nearest": interpolate("nearest"),
    "interpolate_bilinear": interpolate("bilinear"),
    "interpolate_bicubic": interpolate("bicubic"),
}


def parsed(shape):
    """`4096x256 dim 0` as its dimensions and what the words behind them say."""
    dims, *words = shape.split()
    return [int(size) for size in dims.split("x")], {word: int(number) for word, number in zip(words[::2], words[1::2])}


def call_of(op, of_pass, dtype, shape):
    dims, options = parsed(shape)
    x, run = OPERATIONS[op](dims, options, DTYPES[dtype])
    if of_pass == "forward":

        def forward():
            with torch.no_grad():
                return run(x)

        return forward
    x.requires_grad_()

    def forward_backward():
        x.grad = None
        y = run(x)
        # Burn fills the gradient of the output in each pass, too.
        y.backward(torch.ones_like(y))

    return forward_backward


def batch_ms(run, calls):
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3 / calls


def measure(run):
    batch_ms(run, 1)
    once = batch_ms(run, 1)
    if once > SLOW_MS:
        return once, once, once
    if once < BATCH_MS:
        once = batch_ms(run, 5)
    calls = min(MOST_CALLS, max(1, math.ceil(BATCH_MS / once)))
    rounds = int(min(5, max(2, CASE_MS / (calls * once))))
    times = sorted(batch_ms(run, calls) for _ in range(rounds))
    return statistics.median(times), times[0], times[-1]


def copy_rate():
    x = numbers([16384, 4096], torch.float32)
    return 8 * x.numel() / measure(lambda: x + 1.0)[0] / 1e6


def main():
    parser = argparse.ArgumentParser(description="Times PyTorch's side of ops_sweep.")
    parser.add_argument("cases", help="what `ops_sweep --list` printed")
    parser.add_argument("--date", default="-")
    parser.add_argument("--commit", default="-")
    parser.add_argument("--note", default="")
    arguments = parser.parse_args()
    with open(arguments.cases) as file:
        cases = [line.rstrip("\n").split("\t") for line in file]
    copy = copy_rate()
    for op, of_pass, dtype, shape, moved in cases:
        head = [arguments.date, arguments.commit, op, of_pass, dtype, shape, "torch"]
        tail = f"{torch.__version__} eager; {arguments.note}"
        try:
            median, least, most = measure(call_of(op, of_pass, dtype, shape))
        except Exception as error:  # One that fails leaves the others to be timed.
            reason = " ".join(str(error).split()[:40])
            print(*head, "-", "-", "-", "-", "GB/s", f"failed: {reason}; {tail}", sep="\t", flush=True)
            continue
        rate = int(moved) / median / 1e6
        note = f"{copy / rate:.2f} times a copy of its bytes, which makes {copy:.0f} GB/s; {tail}"
        times = [f"{value:.4f}" for value in (median, least, most)]
        print(*head, *times, f"{rate:.1f}", "GB/s", note, sep="\t", flush=True)


if __name__ == "__main__":
    main()
