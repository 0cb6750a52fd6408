"""PyTorch's side of what memory bounds: norms, softmax, GELU, pools, SwiGLU, cross-entropy, AdamW, gradient descent.

    python3 torch_memory.py > torch.tsv
    python3 torch_memory.py softmax gelu > torch.tsv    # some of them

Prints op, pass, shape, subject, median, least and most milliseconds, GB/s. Bytes are those that have to be
moved: what Blackburn's side counts. Timed as torch_matmul.py does.
"""

import math
import statistics
import sys
import time

import torch
import torch.nn.functional as F

DEVICE, BF16 = "cuda", torch.bfloat16


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


def show(op, of_pass, shape, subject, moved, run):
    median, least, most = measure(run)
    print(op, of_pass, shape, subject, f"{median:.4f}", f"{least:.4f}", f"{most:.4f}", f"{moved / median / 1e6:.0f}", sep="\t", flush=True)


def layer_norms():
    for rows, columns in [(65536, 4096), (8192, 768)]:
        x = torch.randn(rows, columns, device=DEVICE, dtype=BF16)
        dy = torch.randn_like(x)
        norm = torch.nn.LayerNorm(columns, device=DEVICE, dtype=BF16)

        def forward_backward(call, x=x, dy=dy, norm=norm):
            x.grad = norm.weight.grad = norm.bias.grad = None
            call(x).backward(dy)

        for subject, call in [("torch", norm), ("torch-compile", torch.compile(norm))]:
            with torch.no_grad():
                show("layer_norm", "forward", f"{rows}x{columns}", subject, 4 * x.numel(), lambda: call(x))
            x.requires_grad_()
            show("layer_norm", "forward_backward", f"{rows}x{columns}", subject, 10 * x.numel(), lambda: forward_backward(call))
            x.requires_grad_(False)


def pools():
    for kind, (images, size, channels), (kernel, stride, padding) in [
        ("max", (256, 112, 64), (3, 2, 1)),
        ("max", (128, 56, 64), (2, 2, 0)),
        ("average", (256, 112, 64), (3, 2, 1)),
        ("average", (128, 56, 64), (2, 2, 0)),
        ("global", (256, 7, 2048), (7, 7, 0)),
    ]:
        for dtype in (BF16, torch.float32):
            x = torch.randn(images, channels, size, size, device=DEVICE, dtype=dtype)
            x = x.to(memory_format=torch.channels_last)
            call = {
                "max": lambda x: F.max_pool2d(x, kernel, stride, padding),
                "average": lambda x: F.avg_pool2d(x, kernel, stride, padding),
                "global": lambda x: F.adaptive_avg_pool2d(x, 1),
            }[kind]
            dy = torch.randn_like(call(x))
            # x in and y out. With a gradient a maximum has its indices, of 64 bits here; Blackburn's have 32, and
            # that is what is counted.
            once = (x.numel() + dy.numel()) * x.element_size()
            twice = 2 * (once + (4 * dy.numel() if kind == "max" else 0))

            def forward_backward(x=x, dy=dy, call=call):
                x.grad = None
                call(x).backward(dy)

            name = f"{kind}{kernel}x{kernel}by{stride} {images}x{size}x{size}x{channels} {str(dtype).removeprefix('torch.')}"
            with torch.no_grad():
                show("pool", "forward", name, "torch", once, lambda: call(x))
            x.requires_grad_()
            show("pool", "forward_backward", name, "torch", twice, forward_backward)


def activation(op, function):
    rows, columns = 65536, 4096
    x = torch.randn(rows, columns, device=DEVICE, dtype=BF16)
    for subject, call in [("torch", function), ("torch-compile", torch.compile(function))]:
        with torch.no_grad():
            show(op, "forward", f"{rows}x{columns}", subject, 4 * x.numel(), lambda: call(x))


def swiglu():
    rows, columns = 16384, 5632
    gate, up, dy = (torch.randn(rows, columns, device=DEVICE, dtype=BF16) for _ in range(3))
    function = lambda gate, up: F.silu(gate) * up
    for subject, call in [("torch", function), ("torch-compile", torch.compile(function))]:
        with torch.no_grad():
            show("swiglu", "forward", f"{rows}x{columns}", subject, 6 * gate.numel(), lambda: call(gate, up))
        gate.requires_grad_(), up.requires_grad_()
        y = call(gate, up)
        # The graph is kept, so that backward alone is timed.
        gradients = lambda: torch.autograd.grad(y, (gate, up), dy, retain_graph=True)
        show("swiglu", "backward", f"{rows}x{columns}", subject, 10 * gate.numel(), gradients)
        gate.requires_grad_(False), up.requires_grad_(False)


def cross_entropy():
    rows, classes = 8192, 50257
    logits = torch.randn(rows, classes, device=DEVICE, dtype=BF16, requires_grad=True)
    targets = torch.randint(0, classes, (rows,), device=DEVICE)

    def forward_backward(call):
        logits.grad = None
        call(logits, targets).backward()

    for subject, call in [("torch", F.cross_entropy), ("torch-compile", torch.compile(F.cross_entropy))]:
        with torch.no_grad():
            show("cross_entropy", "forward", f"{rows}x{classes}", subject, 2 * logits.numel(), lambda: call(logits, targets))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        show("cross_entropy", "forward_backward", f"{rows}x{classes}", subject, 6 * logits.numel(), lambda: forward_backward(call))
        print(f"# {subject}: peak {(torch.cuda.max_memory_allocated() - before) >> 20} MiB beside the logits", flush=True)


def parameters_of_gpt2():
    width, layers, vocabulary, context = 768, 12, 50_257, 1024
    norm = [(width,)] * 2

    def linear(outputs, inputs):
        return [(outputs, inputs), (outputs,)]

    layer = norm + linear(3 * width, width) + linear(width, width) + norm + linear(4 * width, width) + linear(width, 4 * width)
    shapes = layers * layer + norm + [(vocabulary, width), (context, width), (vocabulary, width)]
    parameters = [torch.randn(shape, device=DEVICE).requires_grad_() for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return parameters, sum(parameter.numel() for parameter in parameters)


def adamw():
    parameters, elements = parameters_of_gpt2()
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.1, fused=True)
    show("adamw", "step", str(elements), "torch", 28 * elements, optimizer.step)


def sgd():
    parameters, elements = parameters_of_gpt2()
    optimizer = torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, weight_decay=1e-4, fused=True)
    show("sgd", "step", str(elements), "torch", 20 * elements, optimizer.step)


MEASURES = {
    "layer_norm": layer_norms,
    "softmax": lambda: activation("softmax", lambda x: F.softmax(x, dim=-1)),
    "gelu": lambda: activation("gelu", F.gelu),
    "pool": pools,
    "swiglu": swiglu,
    "cross_entropy": cross_entropy,
    "adamw": adamw,
    "sgd": sgd,
}


if __name__ == "__main__":
    for name in sys.argv[1:] or MEASURES:
        if name not in MEASURES:
            sys.exit(f"{name}: expected one of {', '.join(MEASURES)}")
        MEASURES[name]()
