"""Whole models in PyTorch as their best users write them: BERT-large, Llama of 1.1 billion, four layers of Llama of 8
billion, ResNet-50, ResNeXt-50, DenseNet-121, ConvNeXt-T, a vision transformer, Swin-T, an MLP mixer, MobileNet v2,
EfficientNet-B0, a detector, an encoder and decoder, T5, a mixture of experts, U-Nets, EDSR, DiT-B, DCGAN, WaveNet,
Conformer, a graph convolutional network, DLRM, and one LSTM or GRU layer.

    python3 torch_models.py bert-large --commit abc1234 --note "driver ..."
    python3 torch_models.py llama-1.1b --batch 8 ...
    python3 torch_models.py resnet50 --batch 64,256 ...
    python3 torch_models.py vit-b16 ...

Prints a row of benches/results for each batch size. Options and timing are those of torch_gpt.py, and some of the
models stand in torch_networks.py and torch_systems.py; all three must lie beside this file.
"""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

import torch_networks as networks
import torch_systems as systems
from torch_gpt import Training, add_options, forget, print_row, timed


def heads(x, count):
    """`[batch, length, count * width]` as `[batch, count, length, width]`."""
    batch, length, width = x.shape
    return x.view(batch, length, count, width // count).transpose(1, 2)


def joined(x):
    batch, count, length, width = x.shape
    return x.transpose(1, 2).reshape(batch, length, count * width)


class EncoderLayer(nn.Module):
    """Norms behind the sums as in BERT, or in front of the layers."""

    def __init__(self, width, count, norm_first=False, dropout=0.0):
        super().__init__()
        self.count, self.norm_first, self.rate, self.dropout = count, norm_first, dropout, nn.Dropout(dropout)
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def attended(self, x):
        q, k, v = (heads(layer(x), self.count) for layer in (self.query, self.key, self.value))
        return self.dropout(self.output(joined(F.scaled_dot_product_attention(q, k, v, dropout_p=self.rate))))

    def forward(self, x):
        fed = lambda x: self.dropout(self.outer(self.dropout(F.gelu(self.inner(x)))))
        if self.norm_first:
            x = x + self.attended(self.norm_1(x))
            return x + fed(self.norm_2(x))
        x = self.norm_1(x + self.attended(x))
        return self.norm_2(x + fed(x))


class Bert(nn.Module):
    def __init__(self, layers=24, width=1024, count=16, length=512, vocabulary=30522, dropout=0.0):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.Sequential(*(EncoderLayer(width, count, dropout=dropout) for _ in range(layers)))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids):
        positions = self.positions(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.layers(self.tokens(ids) + positions))


class Vit(nn.Module):
    """Over patches of 16 pixels, with the mean of all patches before the head."""

    def __init__(self, layers=12, width=768, count=12, side=14, classes=1000, dropout=0.0):
        super().__init__()
        self.patches, self.places = nn.Conv2d(3, width, 16, 16), nn.Embedding(side * side, width)
        self.layers = nn.Sequential(*(EncoderLayer(width, count, True, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = self.layers(x + self.places.weight)
        return self.head(self.norm(x).mean(1))


class Recurrent(nn.Module):
    def __init__(self, kind, width=1024):
        super().__init__()
        self.layer = kind(width, width, batch_first=True)

    def forward(self, x):
        return self.layer(x)[0]


class DecoderLayer(nn.Module):
    """Over what an encoder made, norms behind the sums; keys and values, and all three of the first, as one product."""

    def __init__(self, width, count):
        super().__init__()
        self.count = count
        self.projected, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.query, self.memory, self.crossed = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))

    def forward(self, x, memory):
        q, k, v = (heads(y, self.count) for y in self.projected(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = self.norms[0](x + self.output(joined(attended)))
        k, v = (heads(y, self.count) for y in self.memory(memory).chunk(2, -1))
        attended = F.scaled_dot_product_attention(heads(self.query(x), self.count), k, v)
        x = self.norms[1](x + self.crossed(joined(attended)))
        return self.norms[2](x + self.outer(F.gelu(self.inner(x))))


class Seq2Seq(nn.Module):
    def __init__(self, layers=6, width=512, count=8, length=128, vocabulary=32000):
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.encoder = nn.Sequential(*(EncoderLayer(width, count) for _ in range(layers)))
        self.decoder = nn.ModuleList(DecoderLayer(width, count) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids):
        source, ids = ids.chunk(2)
        memory = self.encoder(self.words(source) + self.places.weight)
        x = self.words(ids) + self.places.weight
        for layer in self.decoder:
            x = layer(x, memory)
        return self.head(x)


class Residual(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(32, channels) for channels in (inputs, outputs))
        self.convs = nn.ModuleList(nn.Conv2d(channels, outputs, 3, padding=1) for channels in (inputs, outputs))
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x):
        y = x
        for norm, conv in zip(self.norms, self.convs):
            y = conv(F.silu(norm(y)))
        return self.shortcut(x) + y


class UNet(nn.Module):
    """The network of a diffusion model without its time."""

    def __init__(self, width=128, depth=3):
        super().__init__()
        levels = [width << level for level in range(depth)]
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(Residual(c, c) for c in levels)
        self.narrow = nn.ModuleList(nn.Conv2d(c, 2 * c, 3, 2, 1) for c in levels)
        self.middle = Residual(width << depth, width << depth)
        self.wide = nn.ModuleList(nn.ConvTranspose2d(2 * c, c, 2, 2) for c in levels)
        self.up = nn.ModuleList(Residual(2 * c, c) for c in levels)
        self.norm, self.head = nn.GroupNorm(32, width), nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x):
        x, kept = self.stem(x), []
        for block, narrow in zip(self.down, self.narrow):
            x = block(x)
            kept.append(x)
            x = narrow(x)
        x = self.middle(x)
        for block, wide, beside in reversed(list(zip(self.up, self.wide, kept))):
            x = block(torch.cat([wide(x), beside], 1))
        return self.head(F.silu(self.norm(x)))


class Twice(nn.Sequential):
    def __init__(self, inputs, outputs):
        layers = []
        for channels in (inputs, outputs):
            layers += [nn.Conv3d(channels, outputs, 3, padding=1), nn.BatchNorm3d(outputs), nn.ReLU(inplace=True)]
        super().__init__(*layers)


class VolumeNet(nn.Module):
    """A network that segments volumes, which are halved by strided convolutions."""

    def __init__(self, width=32, depth=3, classes=4):
        super().__init__()
        levels = [width << level for level in range(depth)]
        self.stem = Twice(1, width)
        self.narrow = nn.ModuleList(nn.Conv3d(c, 2 * c, 3, 2, 1) for c in levels)
        self.down = nn.ModuleList(Twice(2 * c, 2 * c) for c in levels)
        self.wide = nn.ModuleList(nn.ConvTranspose3d(2 * c, c, 2, 2) for c in levels)
        self.up = nn.ModuleList(Twice(2 * c, c) for c in levels)
        self.head = nn.Conv3d(width, classes, 1)

    def forward(self, x):
        x, kept = self.stem(x), []
        for narrow, block in zip(self.narrow, self.down):
            kept.append(x)
            x = block(narrow(x))
        for block, wide, beside in reversed(list(zip(self.up, self.wide, kept))):
            x = block(torch.cat([wide(x), beside], 1))
        return self.head(x)


class Mixing(nn.Module):
    def __init__(self, tokens, width):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.inner = nn.ModuleList([nn.Linear(tokens, width // 2), nn.Linear(width, 4 * width)])
        self.outer = nn.ModuleList([nn.Linear(width // 2, tokens), nn.Linear(4 * width, width)])

    def forward(self, x):
        fed = lambda part, x: self.outer[part](F.gelu(self.inner[part](x)))
        x = x + fed(0, self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + fed(1, self.norms[1](x))


class Mixer(nn.Module):
    """Over patches of 16 pixels."""

    def __init__(self, layers=12, width=768, side=14, classes=1000):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.layers = nn.Sequential(*(Mixing(side * side, width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images):
        x = self.layers(self.patches(images).flatten(2).transpose(1, 2))
        return self.head(self.norm(x).mean(1))


class WaveNet(nn.Module):
    """Sums of what gates let through of what lies behind in time, at a growing distance."""

    def __init__(self, width=128, layers=20, classes=256):
        super().__init__()
        self.distances = [1 << (layer % 10) for layer in range(layers)]
        self.stem = nn.Conv1d(1, width, 2)
        # Value and gate are one product.
        self.gates = nn.ModuleList(nn.Conv1d(width, 2 * width, 2, dilation=d) for d in self.distances)
        self.on = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in self.distances)
        self.out = nn.ModuleList(nn.Conv1d(width, 2 * width, 1) for _ in self.distances)
        self.head = nn.Sequential(
            nn.ReLU(), nn.Conv1d(2 * width, 2 * width, 1), nn.ReLU(), nn.Conv1d(2 * width, classes, 1)
        )

    def forward(self, x):
        x, total = self.stem(F.pad(x, (1, 0))), 0
        for distance, gate, on, out in zip(self.distances, self.gates, self.on, self.out):
            value, gate = gate(F.pad(x, (distance, 0))).chunk(2, 1)
            gated = torch.tanh(value) * torch.sigmoid(gate)
            total = total + out(gated)
            x = x + on(gated)
        return self.head(total).transpose(1, 2)


class LlamaLayer(nn.Module):
    def __init__(self, width, count, shared, hidden):
        super().__init__()
        layer = lambda inputs, outputs: nn.Linear(inputs, outputs, bias=False)
        self.count, self.shared = count, shared
        narrow = width // count * shared
        self.query, self.output = layer(width, width), layer(width, width)
        self.key, self.value = layer(width, narrow), layer(width, narrow)
        self.gate, self.up, self.down = layer(width, hidden), layer(width, hidden), layer(hidden, width)
        self.norm_1, self.norm_2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)

    def forward(self, x, cosine, sine):
        def rotated(x):
            even, odd = x[..., ::2], x[..., 1::2]
            c, s = cosine.to(x.dtype), sine.to(x.dtype)
            return torch.stack((even * c - odd * s, even * s + odd * c), -1).flatten(-2)

        h = self.norm_1(x)
        q, k = rotated(heads(self.query(h), self.count)), rotated(heads(self.key(h), self.shared))
        v = heads(self.value(h), self.shared)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.output(joined(attended))
        h = self.norm_2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    def __init__(self, layers=22, width=2048, count=32, shared=4, hidden=5632, length=2048, vocabulary=32000):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(LlamaLayer(width, count, shared, hidden) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width, eps=1e-5), nn.Linear(width, vocabulary, bias=False)
        size = width // count
        rates = 1.0 / 10000 ** (torch.arange(0, size, 2).float() / size)
        angles = torch.outer(torch.arange(length).float(), rates)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, ids):
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x, self.cosine, self.sine)
        return self.head(self.norm(x))


def llama_layers():
    """Four layers of Llama of 8 billion, at full width and vocabulary."""
    return Llama(layers=4, width=4096, shared=8, hidden=14336, length=8192, vocabulary=128256)


def text(batch, length, vocabulary, args):
    return tuple(torch.randint(0, vocabulary, (batch, length), device=args.device) for _ in range(2))


def images(batch, args):
    dtype = torch.bfloat16 if args.precision == "bf16" else torch.float32
    inputs = torch.randn(batch, 3, 224, 224, device=args.device, dtype=dtype)
    targets = torch.randint(0, 1000, (batch,), device=args.device)
    return inputs.to(memory_format=torch.channels_last), targets


def sequences(batch, args, length=256, width=1024, classes=1024):
    dtype = torch.bfloat16 if args.precision == "bf16" else torch.float32
    inputs = torch.randn(batch, length, width, device=args.device, dtype=dtype)
    return inputs, torch.randint(0, classes, (batch, length), device=args.device)


def pairs(batch, args):
    """Sentences and their translations, below each other, and what the latter's words are followed by."""
    ids = torch.randint(0, 32000, (2 * batch, 128), device=args.device)
    return ids, torch.randint(0, 32000, (batch, 128), device=args.device)


def noise(batch, args):
    inputs = torch.randn(batch, 3, 64, 64, device=args.device).to(memory_format=torch.channels_last)
    return inputs, torch.randn_like(inputs)


def volumes(batch, args, size=96):
    of = lambda channels: torch.randn(batch, channels, size, size, size, device=args.device)
    return of(1).to(memory_format=torch.channels_last_3d), of(4).to(memory_format=torch.channels_last_3d)


def sound(batch, args, length=8192, classes=256):
    inputs = torch.randn(batch, 1, length, device=args.device)
    return inputs, torch.randint(0, classes, (batch, length), device=args.device)


def densenet():
    import torchvision

    return torchvision.models.densenet121().to(memory_format=torch.channels_last)


def convnext():
    import torchvision

    return torchvision.models.convnext_tiny(stochastic_depth_prob=0.0).to(memory_format=torch.channels_last)


def unet_3d():
    return VolumeNet().to(memory_format=torch.channels_last_3d)


def unet():
    return UNet().to(memory_format=torch.channels_last)


def resnet50():
    import torchvision

    return torchvision.models.resnet50().to(memory_format=torch.channels_last)


def mobilenet():
    import torchvision

    return torchvision.models.mobilenet_v2(dropout=0.0).to(memory_format=torch.channels_last)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = {
        "bert-large": (Bert, "16", lambda batch, args: text(batch, 512, 30522, args), 512),
        "llama-1.1b": (Llama, "8", lambda batch, args: text(batch, 2048, 32000, args), 2048),
        "llama-8b-layers": (llama_layers, "1", lambda batch, args: text(batch, 8192, 128256, args), 8192),
        "resnet50": (resnet50, "64", images, None),
        "vit-b16": (Vit, "128", images, None),
        "mobilenet-v2": (mobilenet, "128", images, None),
        "lstm": (lambda: Recurrent(nn.LSTM), "64", sequences, 256),
        "gru": (lambda: Recurrent(nn.GRU), "64", sequences, 256),
        "seq2seq": (Seq2Seq, "32", pairs, 128),
        "unet": (unet, "32", noise, None),
        "unet-3d": (unet_3d, "2", volumes, None),
        "densenet-121": (densenet, "64", images, None),
        "convnext-t": (convnext, "64", images, None),
        "mixer-b16": (Mixer, "128", images, None),
        "wavenet": (WaveNet, "8", sound, 8192),
        "efficientnet-b0": (networks.efficientnet, "128", images, None),
        "resnext-50": (networks.resnext, "64", images, None),
        "swin-t": (networks.swin, "64", images, None),
        "conformer": (networks.Conformer, "16", lambda batch, args: sequences(batch, args, 512, 512, 1024), 512),
        "dit-b": (networks.Dit, "64", networks.patches, 256),
        "gcn": (networks.GraphNet, "1", networks.graph, 100_000),
        "dcgan": (networks.dcgan, "128", networks.drawn_and_real, None),
        "diffusion-unet": (systems.diffusion_unet, "64", systems.latents, None),
        "detector": (systems.detector, "32", systems.objects, None),
        "t5-small": (systems.T5, "32", systems.source_and_target, 512 + 128),
        "moe": (systems.Mixture, "8", systems.words, 1024),
        "dlrm": (systems.Dlrm, "8192", systems.samples, None),
        "edsr": (systems.edsr, "16", systems.small_and_large, None),
    }
    parser.add_argument("model", choices=list(models))
    add_options(parser)
    parser.set_defaults(batch=None)
    args = parser.parse_args()
    args.steps = args.steps or 20
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
    model, usual, data_of, length = models[args.model]
    for batch in map(int, (args.batch or usual).split(",")):
        torch.manual_seed(0)
        forget(args)
        # Models without transformers have no such option.
        options = {"dropout": args.dropout} if args.dropout else {}
        training = Training(model(**options), args)
        data = [data_of(batch, args)]
        first, times = timed(lambda: training.step(data), args)
        shape = f"B{batch}" if length is None else f"B{batch}T{length}"
        shape += "W1024" if args.model in ("lstm", "gru") else ""
        units = {"wavenet": "samples/s", "conformer": "frames/s", "gcn": "nodes/s"}
        unit = "images/s" if length is None else units.get(args.model, "tokens/s")
        kind = "random images, channels_last" if length is None else "random data"
        if args.model == "unet-3d":
            shape, unit, kind = f"{shape}D96", "volumes/s", "random volumes, channels_last_3d"
        if args.model == "gcn":
            shape = f"B{batch}N{length}"
        if args.model == "dlrm":
            unit, kind = "samples/s", "random data"
        notes = [f"{args.mode}, {kind}, no clipping"]
        print_row(args, args.model, shape, batch * (length or 1), unit, notes, first, times)


if __name__ == "__main__":
    main()
