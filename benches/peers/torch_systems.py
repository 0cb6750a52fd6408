"""More networks of torch_models.py, which takes them from here: a diffusion U-Net, a detector, EDSR, T5, a mixture of
experts and DLRM. Nothing is run by this file.
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from torch_networks import Attention, dtype_of, in_heads


class PixelAttention(nn.Module):
    """Attention of all pixels."""

    def __init__(self, channels):
        super().__init__()
        self.norm, self.attention = nn.GroupNorm(32, channels), Attention(channels, channels // 64)

    def forward(self, x):
        y = self.attention(self.norm(x).flatten(2).transpose(1, 2))
        return x + y.transpose(1, 2).reshape(x.shape)


class Denoising(nn.Module):
    """Two convolutions around group norms and a sum, between which each channel is told the time, and attention."""

    def __init__(self, inputs, outputs, times, is_attending):
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(32, channels) for channels in (inputs, outputs))
        self.convs = nn.ModuleList(nn.Conv2d(channels, outputs, 3, padding=1) for channels in (inputs, outputs))
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)
        self.time = nn.Linear(times, outputs)
        self.attention = PixelAttention(outputs) if is_attending else nn.Identity()

    def forward(self, x, times):
        y = self.convs[0](F.silu(self.norms[0](x))) + self.time(F.silu(times))[:, :, None, None]
        y = self.convs[1](F.silu(self.norms[1](y)))
        return self.attention(self.shortcut(x) + y)


class DiffusionUNet(nn.Module):
    """A network that removes noise from latents. All levels but the first have attention."""

    def __init__(self, width=128, levels=(1, 2, 2), blocks=2, channels=4):
        super().__init__()
        self.width, times, last = width, 4 * width, len(levels) - 1
        self.times = nn.Sequential(nn.Linear(width, times), nn.SiLU(), nn.Linear(times, times))
        self.stem = nn.Conv2d(channels, width, 3, padding=1)
        self.down, self.narrow, self.up, self.wide = (nn.ModuleList() for _ in range(4))
        inputs, kept = width, [width]
        for level, factor in enumerate(levels):
            stage = nn.ModuleList()
            for _ in range(blocks):
                stage.append(Denoising(inputs, factor * width, times, level > 0))
                inputs = factor * width
                kept.append(inputs)
            self.down.append(stage)
            if level < last:
                self.narrow.append(nn.Conv2d(inputs, inputs, 3, 2, 1))
                kept.append(inputs)
        self.middle = nn.ModuleList(Denoising(inputs, inputs, times, is_first) for is_first in (True, False))
        for level, factor in reversed(list(enumerate(levels))):
            stage = nn.ModuleList()
            for _ in range(blocks + 1):
                stage.append(Denoising(inputs + kept.pop(), factor * width, times, level > 0))
                inputs = factor * width
            self.up.append(stage)
            if level > 0:
                self.wide.append(nn.Conv2d(inputs, inputs, 3, padding=1))
        self.norm, self.head = nn.GroupNorm(32, width), nn.Conv2d(width, channels, 3, padding=1)

    def forward(self, inputs):
        x, times = inputs
        half = self.width // 2
        rates = torch.exp(torch.arange(half, device=x.device) * (-math.log(10_000) / half))
        angles = times[:, None].float() * rates[None]
        times = self.times(torch.cat([angles.cos(), angles.sin()], 1).to(x.dtype))
        x = self.stem(x)
        kept = [x]
        for level, stage in enumerate(self.down):
            for block in stage:
                x = block(x, times)
                kept.append(x)
            if level < len(self.narrow):
                x = self.narrow[level](x)
                kept.append(x)
        for block in self.middle:
            x = block(x, times)
        for level, stage in enumerate(self.up):
            for block in stage:
                x = block(torch.cat([x, kept.pop()], 1), times)
            if level < len(self.wide):
                x = self.wide[level](F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return self.head(F.silu(self.norm(x)))


def unit(inputs, outputs, size=1, stride=1):
    """A convolution, its norm and SiLU."""
    conv = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.SiLU(inplace=True))


class CrossStage(nn.Module):
    """Half of the channels go through blocks, and all that these made is joined."""

    def __init__(self, inputs, outputs, blocks, is_sum):
        super().__init__()
        half = outputs // 2
        self.first, self.last, self.is_sum = unit(inputs, outputs), unit((2 + blocks) * half, outputs), is_sum
        self.blocks = nn.ModuleList(nn.Sequential(unit(half, half, 3), unit(half, half, 3)) for _ in range(blocks))

    def forward(self, x):
        parts = list(self.first(x).chunk(2, 1))
        for block in self.blocks:
            y = block(parts[-1])
            parts.append(parts[-1] + y if self.is_sum else y)
        return self.last(torch.cat(parts, 1))


class Pyramid(nn.Module):
    """The largest numbers around each pixel, in windows that grow."""

    def __init__(self, channels):
        super().__init__()
        self.narrow, self.wide = unit(channels, channels // 2), unit(2 * channels, channels)

    def forward(self, x):
        parts = [self.narrow(x)]
        for _ in range(3):
            parts.append(F.max_pool2d(parts[-1], 5, 1, 2))
        return self.wide(torch.cat(parts, 1))


class Detector(nn.Module):
    """Of the kind of YOLO, with paths up and down between three scales. Gives its loss."""

    def __init__(self, width=32, classes=80, boxes=3):
        super().__init__()
        self.boxes, self.numbers = boxes, 5 + classes
        self.stem = unit(3, width, 3, 2)
        widths = [width << place for place in range(5)]
        steps = zip(widths, widths[1:], (1, 2, 2, 1))
        self.stages = nn.ModuleList(
            nn.Sequential(unit(inputs, outputs, 3, 2), CrossStage(outputs, outputs, blocks, True))
            for inputs, outputs, blocks in steps
        )
        fine, middle, coarse = widths[2:]
        self.pyramid = Pyramid(coarse)
        self.up = nn.ModuleList(
            [CrossStage(coarse + middle, middle, 1, False), CrossStage(middle + fine, fine, 1, False)]
        )
        self.halved = nn.ModuleList([unit(fine, fine, 3, 2), unit(middle, middle, 3, 2)])
        self.down = nn.ModuleList(
            [CrossStage(fine + middle, middle, 1, False), CrossStage(middle + coarse, coarse, 1, False)]
        )
        self.heads = nn.ModuleList(nn.Conv2d(channels, boxes * self.numbers, 1) for channels in widths[2:])

    def scales(self, x):
        doubled = lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest")
        x, seen = self.stem(x), []
        for stage in self.stages:
            x = stage(x)
            seen.append(x)
        coarse = self.pyramid(x)
        middle = self.up[0](torch.cat([doubled(coarse), seen[2]], 1))
        fine = self.up[1](torch.cat([doubled(middle), seen[1]], 1))
        middle = self.down[0](torch.cat([self.halved[0](fine), middle], 1))
        return fine, middle, self.down[1](torch.cat([self.halved[1](middle), coarse], 1))

    def forward(self, inputs):
        images, sides, objects, classes = inputs
        boxes = []
        for head, x in zip(self.heads, self.scales(images)):
            y = head(x).unflatten(1, (self.boxes, self.numbers)).flatten(3)
            boxes.append(y.transpose(2, 3).flatten(1, 2))
        y = torch.cat(boxes, 1).float()
        of_objects = F.binary_cross_entropy_with_logits(y[..., 4:5], objects)
        of_classes = F.binary_cross_entropy_with_logits(y[..., 5:], classes)
        return of_objects + of_classes + F.smooth_l1_loss(torch.sigmoid(y[..., :4]), sides)


class Edsr(nn.Module):
    """Images of twice the height and width, by blocks without norms. Gives its loss."""

    def __init__(self, width=64, blocks=16, factor=2):
        super().__init__()
        conv = lambda inputs, outputs: nn.Conv2d(inputs, outputs, 3, padding=1)
        block = lambda: nn.Sequential(conv(width, width), nn.ReLU(inplace=True), conv(width, width))
        self.stem, self.last = conv(3, width), conv(width, width)
        self.blocks = nn.ModuleList(block() for _ in range(blocks))
        self.wide = nn.Sequential(conv(width, factor**2 * width), nn.PixelShuffle(factor), conv(width, 3))

    def forward(self, inputs):
        images, targets = inputs
        stem = x = self.stem(images)
        for block in self.blocks:
            x = x + block(x)
        return F.l1_loss(self.wide(stem + self.last(x)).float(), targets.float())


class T5Attention(nn.Module):
    """Behind a norm, with scores that are not scaled; what reads the same tokens is one product."""

    def __init__(self, width, count, is_crossed=False):
        super().__init__()
        layer = lambda outputs: nn.Linear(width, outputs, bias=False)
        self.count, self.norm, self.output = count, nn.RMSNorm(width, eps=1e-6), layer(width)
        self.query = layer(width) if is_crossed else None
        self.projected = layer(2 * width if is_crossed else 3 * width)

    def forward(self, x, memory=None, bias=None):
        y = self.norm(x)
        if self.query is None:
            q, k, v = in_heads(self.projected(y), self.count)
        else:
            heads = lambda y: y.unflatten(-1, (self.count, -1)).transpose(1, 2)
            q = heads(self.query(y))
            k, v = (heads(part) for part in self.projected(memory).chunk(2, -1))
        bias = None if bias is None else bias.to(q.dtype)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        return x + self.output(attended.transpose(1, 2).reshape(x.shape))


class T5Layer(nn.Module):
    def __init__(self, width, count, is_decoder):
        super().__init__()
        self.attention = T5Attention(width, count)
        self.crossed = T5Attention(width, count, True) if is_decoder else None
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.inner, self.outer = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x, memory, bias):
        x = self.attention(x, bias=bias)
        if self.crossed is not None:
            x = self.crossed(x, memory)
        return x + self.outer(F.relu(self.inner(self.norm(x))))


def buckets(tokens, is_causal, count=32, farthest=128):
    """Where pairs of a query and a key find their bias: by their distance where it is small, and by its logarithm where
    it is not."""
    places = torch.arange(tokens)
    apart = places[:, None] - places[None]
    first = torch.zeros_like(apart)
    if is_causal:
        distance = apart.clamp(min=0)
    else:
        count //= 2
        first, distance = count * (apart < 0), apart.abs()
    exact = count // 2
    far = torch.log(distance.clamp(min=1) / exact) / math.log(farthest / exact) * (count - exact)
    return first + torch.where(distance < exact, distance, (exact + far.long()).clamp(max=count - 1))


class T5Stack(nn.Module):
    """An encoder, or a decoder. All layers share what the distance of tokens adds to their scores."""

    def __init__(self, layers, width, count, length, is_decoder):
        super().__init__()
        self.biases, self.norm = nn.Embedding(32, count), nn.RMSNorm(width, eps=1e-6)
        self.layers = nn.ModuleList(T5Layer(width, count, is_decoder) for _ in range(layers))
        self.register_buffer("buckets", buckets(length, is_decoder), persistent=False)
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1) if is_decoder else None
        self.register_buffer("hidden", hidden, persistent=False)

    def forward(self, x, memory=None):
        bias = self.biases(self.buckets).permute(2, 0, 1).unsqueeze(0)
        if self.hidden is not None:
            bias = bias.masked_fill(self.hidden, float("-inf"))
        for layer in self.layers:
            x = layer(x, memory, bias)
        return self.norm(x)


class T5(nn.Module):
    """Without its dropout. The words' table is the head."""

    def __init__(self, layers=6, width=512, count=8, source=512, target=128, vocabulary=32128):
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.encoder = T5Stack(layers, width, count, source, False)
        self.decoder = T5Stack(layers, width, count, target, True)

    def forward(self, inputs):
        source, ids = inputs
        x = self.decoder(self.words(ids), self.encoder(self.words(source)))
        return F.linear(x * x.shape[-1] ** -0.5, self.words.weight)


class Experts(nn.Module):
    """Two layers over each token, by the two experts that a router finds best. An expert has a fixed number of slots:
    what comes too late is left out. Gives a loss that is least where all experts have the same load, too."""

    def __init__(self, width, count=8, choices=2, capacity=1.25):
        super().__init__()
        self.count, self.choices, self.capacity = count, choices, capacity
        self.router = nn.Linear(width, count, bias=False)
        layer = lambda inputs, outputs: nn.Parameter(
            torch.empty(count, inputs, outputs).uniform_(-(inputs**-0.5), inputs**-0.5)
        )
        self.inner, self.outer = layer(width, 4 * width), layer(4 * width, width)

    def forward(self, x):
        tokens, width = x.shape
        choices = tokens * self.choices
        capacity = math.ceil(choices * self.capacity) // self.count
        slots = self.count * capacity
        shares = self.router(x).float().softmax(-1)
        weights, chosen = shares.topk(self.choices, -1)
        weights, chosen = weights / weights.sum(-1, keepdim=True), chosen.view(choices, 1)
        is_chosen = (chosen == torch.arange(self.count, device=x.device)).int()
        place = is_chosen.cumsum(0).gather(1, chosen) - 1
        is_late = place >= capacity
        slot = (chosen * capacity + place).masked_fill(is_late, slots).squeeze(1)
        token_of_slot = slot.new_zeros(slots + 1)
        token_of_slot[slot] = torch.arange(choices, device=x.device) // self.choices
        sent = x.index_select(0, token_of_slot[:slots]).view(self.count, capacity, width)
        y = torch.bmm(F.gelu(torch.bmm(sent, self.inner)), self.outer).view(slots, width)
        y = y.index_select(0, slot.clamp(max=slots - 1)).view(tokens, self.choices, width)
        weights = weights.masked_fill(is_late.view(tokens, self.choices), 0.0).to(y.dtype)
        loads = is_chosen.float().mean(0)
        return (y * weights.unsqueeze(-1)).sum(1), self.count * (loads * shares.mean(0)).sum()


class MixtureLayer(nn.Module):
    def __init__(self, width, count):
        super().__init__()
        self.count, self.norms = count, nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.projected, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.experts = Experts(width)

    def forward(self, x):
        q, k, v = in_heads(self.projected(self.norms[0](x)), self.count)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).reshape(x.shape))
        y, balance = self.experts(self.norms[1](x).flatten(0, 1))
        return x + y.view(x.shape), balance


class Mixture(nn.Module):
    """GPT-2 with a mixture of experts in each layer. Gives its loss."""

    def __init__(self, layers=6, width=768, count=12, length=1024, vocabulary=50304):
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(MixtureLayer(width, count) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, inputs):
        ids, targets = inputs
        x, balances = self.words(ids) + self.places.weight, []
        for layer in self.layers:
            x, balance = layer(x)
            balances.append(balance)
        logits = F.linear(self.norm(x), self.words.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + 0.01 * torch.stack(balances).mean()


def layers(*sizes):
    """Each with a ReLU behind it."""
    parts = []
    for inputs, outputs in zip(sizes, sizes[1:]):
        parts += [nn.Linear(inputs, outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*parts)


class Dlrm(nn.Module):
    """Products of all pairs of what is known of a sample; all tables are one. Gives its loss."""

    def __init__(self, tables=26, rows=100_000, width=64, numbers=13):
        super().__init__()
        self.tables, parts = nn.Embedding(tables * rows, width), tables + 1
        self.bottom = layers(numbers, 512, 256, width)
        self.top = layers(width + parts * (parts - 1) // 2, 1024, 1024, 512, 256)
        self.head = nn.Linear(256, 1)
        self.register_buffer("starts", rows * torch.arange(tables), persistent=False)
        row, column = torch.tril_indices(parts, parts, -1)
        self.register_buffer("pairs", row * parts + column, persistent=False)

    def forward(self, inputs):
        numbers, ids, targets = inputs
        numbers = self.bottom(numbers)
        rows = self.tables(ids + self.starts).to(numbers.dtype)
        parts = torch.cat([numbers.unsqueeze(1), rows], 1)
        products = torch.bmm(parts, parts.transpose(1, 2)).flatten(1).index_select(1, self.pairs)
        logits = self.head(self.top(torch.cat([numbers, products], 1)))
        return F.binary_cross_entropy_with_logits(logits.squeeze(1).float(), targets)


def diffusion_unet():
    return DiffusionUNet().to(memory_format=torch.channels_last)


def detector():
    return Detector().to(memory_format=torch.channels_last)


def edsr():
    return Edsr().to(memory_format=torch.channels_last)


def pictures(args, *shape):
    inputs = torch.randn(*shape, device=args.device, dtype=dtype_of(args))
    return inputs.to(memory_format=torch.channels_last)


def latents(batch, args, channels=4, side=32):
    """With noise, how much of it as steps of time, and the noise."""
    times = torch.randint(0, 1000, (batch,), device=args.device)
    return (pictures(args, batch, channels, side, side), times), pictures(args, batch, channels, side, side)


def objects(batch, args, side=320, classes=80):
    """Images, the sides of all boxes, which of them hold an object, and its classes. The model gives its loss, here and
    below."""
    boxes = 3 * sum((side // pixels) ** 2 for pixels in (8, 16, 32))
    told = lambda numbers: torch.randint(0, 2, (batch, boxes, numbers), device=args.device).float()
    sides = torch.randn(batch, boxes, 4, device=args.device)
    return (pictures(args, batch, 3, side, side), sides, told(1), told(classes)), None


def small_and_large(batch, args, side=96, factor=2):
    return (pictures(args, batch, 3, side, side), pictures(args, batch, 3, factor * side, factor * side)), None


def source_and_target(batch, args, lengths=(512, 128), vocabulary=32128):
    """A source, a target, and the words that follow the latter's."""
    ids = lambda length: torch.randint(0, vocabulary, (batch, length), device=args.device)
    source, target = lengths
    return (ids(source), ids(target)), ids(target)


def words(batch, args, length=1024, vocabulary=50304):
    return tuple(torch.randint(0, vocabulary, (batch, length), device=args.device) for _ in range(2)), None


def samples(batch, args, numbers=13, tables=26, rows=100_000):
    """Numbers, an id for each table, and whether a sample was clicked at."""
    inputs = torch.randn(batch, numbers, device=args.device, dtype=dtype_of(args))
    ids = torch.randint(0, rows, (batch, tables), device=args.device)
    return (inputs, ids, torch.randint(0, 2, (batch,), device=args.device).float()), None
