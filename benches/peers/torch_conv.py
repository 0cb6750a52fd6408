"""PyTorch's convolutions (cuDNN, channels_last, benchmarked plans) by layer and pass, as rows for
benches/results: the layers that `conv_sweep` times.

    python3 torch_conv.py --batch 64,256 --dtype bf16 --commit abc1234 --note "driver 580.159.04"

Timed as Blackburn's side is: median of 15 batches of launches, one wait a batch. `--layout nchw` times the
layout that a user has who does nothing.
"""

import argparse
import datetime

import torch

from torch_matmul import measure

# Channels in and out, height and width, kernel, stride, groups: ResNet-50's, ResNeXt's in groups, and depthwise ones of
# MobileNet v2, EfficientNet B0 and ConvNeXt T.
LAYERS = [
    (3, 64, 224, 7, 2, 1),
    (64, 64, 56, 1, 1, 1),
    (64, 64, 56, 3, 1, 1),
    (64, 256, 56, 1, 1, 1),
    (256, 64, 56, 1, 1, 1),
    (256, 128, 56, 1, 1, 1),
    (128, 128, 56, 3, 2, 1),
    (128, 512, 28, 1, 1, 1),
    (256, 512, 56, 1, 2, 1),
    (512, 128, 28, 1, 1, 1),
    (128, 128, 28, 3, 1, 1),
    (512, 256, 28, 1, 1, 1),
    (256, 256, 28, 3, 2, 1),
    (256, 1024, 14, 1, 1, 1),
    (512, 1024, 28, 1, 2, 1),
    (1024, 256, 14, 1, 1, 1),
    (256, 256, 14, 3, 1, 1),
    (1024, 512, 14, 1, 1, 1),
    (512, 512, 14, 3, 2, 1),
    (512, 2048, 7, 1, 1, 1),
    (1024, 2048, 14, 1, 2, 1),
    (2048, 512, 7, 1, 1, 1),
    (512, 512, 7, 3, 1, 1),
    (128, 128, 56, 3, 1, 32),
    (256, 256, 28, 3, 1, 32),
    (512, 512, 14, 3, 1, 32),
    (1024, 1024, 7, 3, 1, 32),
    (32, 32, 112, 3, 1, 32),
    (96, 96, 112, 3, 2, 96),
    (144, 144, 56, 3, 1, 144),
    (144, 144, 56, 3, 2, 144),
    (192, 192, 28, 3, 1, 192),
    (192, 192, 28, 3, 2, 192),
    (384, 384, 14, 3, 1, 384),
    (576, 576, 14, 3, 1, 576),
    (576, 576, 14, 3, 2, 576),
    (960, 960, 7, 3, 1, 960),
    (144, 144, 56, 5, 2, 144),
    (240, 240, 28, 5, 1, 240),
    (672, 672, 14, 5, 1, 672),
    (1152, 1152, 7, 5, 1, 1152),
    (96, 96, 56, 7, 1, 96),
    (192, 192, 28, 7, 1, 192),
    (384, 384, 14, 7, 1, 384),
    (768, 768, 7, 7, 1, 768),
]


def passes(layer, batch, dtype, memory_format):
    c, k, size, kernel, stride, groups = layer
    padding = (kernel - 1) // 2
    out = (size + 2 * padding - kernel) // stride + 1
    draw = lambda *shape: torch.randn(*shape, device="cuda", dtype=dtype).to(memory_format=memory_format)
    x, w, dy = draw(batch, c, size, size), draw(k, c // groups, kernel, kernel), draw(batch, k, out, out)
    options = {"stride": stride, "padding": padding, "groups": groups}
    # As autograd asks: `torch.nn.grad` hands over stand-ins whose layout makes cuDNN take another way.
    gradient = lambda *wanted: torch.ops.aten.convolution_backward(
        dy, x, w, None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], groups, [*wanted, False]
    )
    yield "fprop", lambda: torch.nn.functional.conv2d(x, w, **options)
    yield "dgrad", lambda: gradient(True, False)
    yield "wgrad", lambda: gradient(False, True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", default="64")
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "f16", "tf32", "f32"])
    parser.add_argument("--layout", default="channels_last", choices=["channels_last", "nchw"])
    parser.add_argument("--implicit", action="store_true", help="no layers of 1 by 1 with stride 1")
    parser.add_argument("--depthwise", action="store_true", help="only layers of single channels")
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    parser.add_argument("--commit", default="-", help="of this repository")
    parser.add_argument("--note", default="", help="driver, machine")
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = args.dtype == "tf32"
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16}.get(args.dtype, torch.float32)
    last = args.layout == "channels_last"
    memory_format = torch.channels_last if last else torch.contiguous_format
    for batch in map(int, args.batch.split(",")):
        for layer in LAYERS:
            c, k, size, kernel, stride, groups = layer
            if args.implicit and kernel == 1 and stride == 1 or args.depthwise and groups != c:
                continue
            name = f"N{batch}C{c}H{size}W{size}K{k}R{kernel}S{kernel} stride{stride}"
            name += f" groups{groups}" if groups > 1 else ""
            out = (size + 2 * ((kernel - 1) // 2) - kernel) // stride + 1
            flops = 2 * batch * out * out * k * c // groups * kernel * kernel
            for pass_name, run in passes(layer, batch, dtype, memory_format):
                median, least, most = measure(run)
                note = f"{torch.__version__}, cuDNN {torch.backends.cudnn.version()}, {args.layout}; {args.note}"
                times = (f"{ms:.4f}" for ms in (median, least, most))
                row = [args.date, args.commit, "conv2d", pass_name, args.dtype, name, "torch"]
                print(*row, *times, f"{flops / median / 1e9:.1f}", "TFLOP/s", note, sep="\t", flush=True)


if __name__ == "__main__":
    main()
