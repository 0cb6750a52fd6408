"""Further networks of torch_models.py, which takes them from here: ResNeXt-50, EfficientNet-B0, Swin-T, Conformer,
DiT-B, a graph convolutional network and DCGAN. Nothing is run by this file.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


def in_heads(projected, count):
    """Queries, keys and values, which are one product, each as `[batch, count, length, width]`."""
    batch, length, width = projected.shape
    parts = projected.view(batch, length, 3, count, width // (3 * count))
    return parts.permute(2, 0, 3, 1, 4).unbind(0)


class Attention(nn.Module):
    """Of tokens among themselves; queries, keys and values are one product."""

    def __init__(self, width, count):
        super().__init__()
        self.count = count
        self.projected, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, bias=None):
        q, k, v = in_heads(self.projected(x), self.count)
        bias = None if bias is None else bias.to(q.dtype)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.output(attended.transpose(1, 2).reshape(x.shape))


def distances(window):
    """Where pairs of tokens in a window find their bias: by the distance in both directions."""
    places = torch.cartesian_prod(torch.arange(window), torch.arange(window))
    apart = places[:, None] - places[None] + window - 1
    return (apart[..., 0] * (2 * window - 1) + apart[..., 1]).flatten()


def shifted_mask(side, window, shift):
    """Keeps tokens apart that lie in a shifted window though they come from opposite sides."""
    places = torch.arange(side)
    part = (places >= side - window).int() + (places >= side - shift).int()
    regions = 3 * part[:, None] + part[None]
    across = side // window
    regions = regions.view(across, window, across, window).transpose(1, 2).reshape(across * across, 1, -1)
    return -100.0 * (regions[..., None] != regions[..., None, :])


class Windowed(nn.Module):
    """Attention within windows, and two layers over each token."""

    def __init__(self, width, count, side, is_shifted, window=7):
        super().__init__()
        self.window = window
        # A single window has nothing to be shifted.
        self.shift = window // 2 if is_shifted and side > window else 0
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = Attention(width, count)
        self.biases = nn.Parameter(0.02 * torch.randn((2 * window - 1) ** 2, count))
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("distances", distances(window), persistent=False)
        mask = shifted_mask(side, window, self.shift) if self.shift else None
        self.register_buffer("mask", mask, persistent=False)

    def bias(self, images):
        tokens, count = self.window**2, self.biases.shape[1]
        bias = self.biases.index_select(0, self.distances).view(tokens, tokens, count).permute(2, 0, 1).unsqueeze(0)
        if self.mask is None:
            return bias
        bias = (bias + self.mask).unsqueeze(0)
        return bias.expand(images, -1, -1, -1, -1).reshape(-1, count, tokens, tokens)

    def forward(self, x):
        batch, height, width, channels = x.shape
        w, s = self.window, self.shift
        y = self.norms[0](x)
        y = torch.roll(y, (-s, -s), (1, 2)) if s else y
        y = y.view(batch, height // w, w, width // w, w, channels).transpose(2, 3).reshape(-1, w * w, channels)
        y = self.attention(y, self.bias(batch))
        y = y.view(batch, height // w, width // w, w, w, channels).transpose(2, 3).reshape(x.shape)
        x = x + (torch.roll(y, (s, s), (1, 2)) if s else y)
        return x + self.outer(F.gelu(self.inner(self.norms[1](x))))


class Merging(nn.Module):
    """Four neighbors become one token."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.narrow = nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x):
        parts = [x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)]
        return self.narrow(self.norm(torch.cat(parts, -1)))


class Swin(nn.Module):
    """Windows of 7 by 7 tokens, every second time shifted."""

    def __init__(self, width=96, side=56, classes=1000):
        super().__init__()
        self.patches, self.norm_of_patches = nn.Conv2d(3, width, 4, 4), nn.LayerNorm(width)
        stages = []
        for layers, count in ((2, 3), (2, 6), (6, 12), (2, 24)):
            if stages:
                stages.append(Merging(width))
                width, side = 2 * width, side // 2
            stages += [Windowed(width, count, side, layer % 2 == 1) for layer in range(layers)]
        self.stages = nn.Sequential(*stages)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images):
        x = self.norm_of_patches(self.patches(images).permute(0, 2, 3, 1))
        return self.head(self.norm(self.stages(x)).mean((1, 2)))


class HalfStep(nn.Module):
    """Two layers over each token behind a norm, of which half is added."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + 0.5 * self.outer(F.silu(self.inner(self.norm(x))))


class Frames(nn.Module):
    """Single channels over 31 frames, between gates and a layer over all channels."""

    def __init__(self, width, size=31):
        super().__init__()
        self.norm, self.norm_of_channels = nn.LayerNorm(width), nn.BatchNorm1d(width)
        self.gates, self.last = nn.Conv1d(width, 2 * width, 1), nn.Conv1d(width, width, 1)
        self.apart = nn.Conv1d(width, width, size, padding=size // 2, groups=width)

    def forward(self, x):
        y = F.glu(self.gates(self.norm(x).transpose(1, 2)), 1)
        y = self.last(F.silu(self.norm_of_channels(self.apart(y))))
        return x + y.transpose(1, 2)


class ConformerLayer(nn.Module):
    def __init__(self, width, count):
        super().__init__()
        self.before, self.behind = HalfStep(width), HalfStep(width)
        self.norm_of_attention, self.attention = nn.LayerNorm(width), Attention(width, count)
        self.frames, self.norm = Frames(width), nn.LayerNorm(width)

    def forward(self, x):
        x = self.before(x)
        x = x + self.attention(self.norm_of_attention(x))
        return self.norm(self.behind(self.frames(x)))


class Conformer(nn.Module):
    """An encoder of speech, whose attention knows no places."""

    def __init__(self, layers=12, width=512, count=8, classes=1024):
        super().__init__()
        self.layers = nn.Sequential(*(ConformerLayer(width, count) for _ in range(layers)))
        self.head = nn.Linear(width, classes)

    def forward(self, frames):
        return self.head(self.layers(frames))


def modulated(x, shift, scale):
    return x * (1 + scale) + shift


def zeros(inputs, outputs):
    """A layer that begins with zeros."""
    layer = nn.Linear(inputs, outputs)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class Conditioned(nn.Module):
    """Attention and two layers over each token, scaled, shifted and gated by what an image is to be."""

    def __init__(self, width, count):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width, eps=1e-6) for _ in range(2))
        self.attention, self.modulation = Attention(width, count), zeros(width, 6 * width)
        self.inner, self.outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, condition):
        parts = self.modulation(condition).chunk(6, -1)
        x = x + parts[2] * self.attention(modulated(self.norms[0](x), *parts[:2]))
        y = modulated(self.norms[1](x), *parts[3:5])
        return x + parts[5] * self.outer(F.gelu(self.inner(y)))


class Dit(nn.Module):
    """A diffusion transformer over patches of 16 numbers, without what embeds times and classes."""

    def __init__(self, layers=12, width=768, count=12, length=256, patch=16):
        super().__init__()
        self.patches, self.places = nn.Linear(patch, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Conditioned(width, count) for _ in range(layers))
        self.norm, self.modulation = nn.LayerNorm(width, eps=1e-6), zeros(width, 2 * width)
        self.head = zeros(width, patch)

    def forward(self, inputs):
        patches, condition = inputs
        condition = F.silu(condition).unsqueeze(1)
        x = self.patches(patches) + self.places.weight
        for layer in self.layers:
            x = layer(x, condition)
        return self.head(modulated(self.norm(x), *self.modulation(condition).chunk(2, -1)))


class GraphNet(nn.Module):
    """Sums over the neighbors of each node and itself."""

    def __init__(self, layers=3, width=256, classes=64):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, inputs):
        x, sources, ends = inputs
        for layer in self.layers:
            x = layer(x)
            x = F.relu(x.index_add(0, ends, x.index_select(0, sources)))
        return self.head(x)


class Dcgan(nn.Module):
    """Draws images of 64 pixels from noise and tells them from real ones; both learn in one step. Gives its loss."""

    def __init__(self, width=64, noise=100):
        super().__init__()
        widths = [8 * width, 4 * width, 2 * width, width]
        layers = [nn.ConvTranspose2d(noise, widths[0], 4, 1, 0, bias=False)]
        for inputs, outputs in zip(widths, [*widths[1:], 3]):
            layers += [nn.BatchNorm2d(inputs), nn.ReLU(True)]
            layers.append(nn.ConvTranspose2d(inputs, outputs, 4, 2, 1, bias=False))
        self.generator = nn.Sequential(*layers, nn.Tanh())
        widths.reverse()
        layers = [nn.Conv2d(3, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, True)]
        for inputs, outputs in zip(widths, widths[1:]):
            layers.append(nn.Conv2d(inputs, outputs, 4, 2, 1, bias=False))
            layers += [nn.BatchNorm2d(outputs), nn.LeakyReLU(0.2, True)]
        self.discriminator = nn.Sequential(*layers, nn.Conv2d(widths[-1], 1, 4, 1, 0, bias=False))

    def forward(self, inputs):
        noise, images = inputs
        drawn, real = self.discriminator(self.generator(noise)), self.discriminator(images)
        return F.softplus(drawn.float()).mean() + F.softplus(-real.float()).mean()


def efficientnet():
    import torchvision

    model = torchvision.models.efficientnet_b0(dropout=0.0, stochastic_depth_prob=0.0)
    return model.to(memory_format=torch.channels_last)


def resnext():
    import torchvision

    return torchvision.models.resnext50_32x4d().to(memory_format=torch.channels_last)


def swin():
    return Swin().to(memory_format=torch.channels_last)


def dcgan():
    return Dcgan().to(memory_format=torch.channels_last)


def dtype_of(args):
    return torch.bfloat16 if args.precision == "bf16" else torch.float32


def patches(batch, args, length=256, width=768, size=16):
    of = lambda *shape: torch.randn(batch, *shape, device=args.device, dtype=dtype_of(args))
    return (of(length, size), of(width)), of(length, size)


def graph(batch, args, nodes=100_000, width=256, classes=64):
    """One graph, of as many times more nodes as the batch has; ten edges begin at a node, on the average."""
    nodes = batch * nodes
    ends = [torch.randint(0, nodes, (10 * nodes,), device=args.device) for _ in range(2)]
    features = torch.randn(nodes, width, device=args.device, dtype=dtype_of(args))
    return (features, *ends), torch.randint(0, classes, (nodes,), device=args.device)


def drawn_and_real(batch, args, noise=100, side=64):
    """Noise and real images. There are no targets: the model gives its loss."""
    of = lambda *shape: torch.randn(batch, *shape, device=args.device, dtype=dtype_of(args))
    return tuple(x.to(memory_format=torch.channels_last) for x in (of(noise, 1, 1), of(3, side, side))), None
