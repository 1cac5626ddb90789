"""Times training steps of PyTorch on the cases of `pipewright bench step --case`, and prints what that prints.

usage: pytorch.py CASE THREADS        (needs torch; SECONDS is how long steps are timed, 4 unless said)
       pytorch.py products THREADS    (reads names of products, as `pipewright bench products` prints them, line by line)

A step is forward, cross-entropy, backward and SGD with momentum, in float32, always on the same random samples. Operations are
those that torch's own counter finds; it does not look into the fused LSTM.
"""
import json
import os
import resource
import statistics
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F


def perceptron():
    wide = nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()
    return nn.Sequential(nn.Flatten(), *wide, nn.Linear(1024, 10))


def lenet():
    stage = lambda ci, co: (nn.Conv2d(ci, co, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    head = nn.Flatten(), nn.Linear(7 * 7 * 64, 128), nn.ReLU(), nn.Linear(128, 10)
    return nn.Sequential(*stage(1, 32), *stage(32, 64), *head)


def vgg16(size, width, classes):
    layers, ci = [], 3
    for co, times in [(64, 2), (128, 2), (256, 3), (512, 3), (512, 3)]:
        for _ in range(times):
            layers += [nn.Conv2d(ci, co, 3, padding=1), nn.ReLU(inplace=True)]
            ci = co
        layers.append(nn.MaxPool2d(2))
    hidden = nn.Linear(512 * (size // 32) ** 2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
    return nn.Sequential(*layers, nn.Flatten(), *hidden, nn.Linear(width, classes))


def normed(ci, co, kernel, stride):
    return nn.Sequential(nn.Conv2d(ci, co, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(co))


class Residual(nn.Module):
    def __init__(self, ci, co, stride):
        super().__init__()
        self.first, self.second = normed(ci, co, 3, stride), normed(co, co, 3, 1)
        self.short = nn.Identity() if (ci, stride) == (co, 1) else normed(ci, co, 1, stride)

    def forward(self, x):
        return F.relu(self.second(F.relu(self.first(x))) + self.short(x))


def resnet18():
    widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
    blocks = [Residual(ci, co, co // ci) for ci, co in zip(widths, widths[1:])]
    return nn.Sequential(normed(3, 64, 3, 1), nn.ReLU(), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.into, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x):
        n, t, width = x.shape
        q, k, v = self.into(x).view(n, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(n, t, width))


class Gpt(nn.Module):
    def __init__(self, vocabulary, length, width, blocks, heads):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        mlp = lambda: nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        mix = lambda: nn.Sequential(nn.LayerNorm(width), Attention(width, heads))
        self.parts = nn.ModuleList(part() for _ in range(blocks) for part in (mix, mlp))
        self.end = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary))

    def forward(self, ids):
        x = self.tokens(ids) + self.places.weight
        for part in self.parts:
            x = x + part(x)
        return self.end(x).flatten(0, 1)


class Lstm(nn.Module):
    def __init__(self, vocabulary, width, layers):
        super().__init__()
        self.tokens, self.end = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.layers = nn.LSTM(width, width, layers, batch_first=True)

    def forward(self, ids):
        return self.end(self.layers(self.tokens(ids))[0]).flatten(0, 1)


def images(n, channels, size):
    return torch.randn(n, channels, size, size), torch.randint(10, (n,))


def tokens(n, length, vocabulary):
    return torch.randint(vocabulary, (n, length)), torch.randint(vocabulary, (n * length,))


CASES = {
    "mlp_b128": (perceptron, lambda: images(128, 1, 28)),
    "lenet_b64": (lenet, lambda: images(64, 1, 28)),
    "vgg16_32_b32": (lambda: vgg16(32, 512, 10), lambda: images(32, 3, 32)),
    "vgg16_224_b4": (lambda: vgg16(224, 4096, 1000), lambda: images(4, 3, 224)),
    "resnet18_32_b32": (resnet18, lambda: images(32, 3, 32)),
    "gpt_d256_l6_t128_b8": (lambda: Gpt(256, 128, 256, 6, 8), lambda: tokens(8, 128, 256)),
    "lstm_d512_l4_t32_b32": (lambda: Lstm(2000, 512, 4), lambda: tokens(32, 32, 2000)),
}


def most_memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def product(name, seconds=0.3):
    """The median GFLOP/s, and what a tenth of the times reaches, of a product whose operands come from beyond a core's own caches."""
    sizes, *transposed = name.split()
    m, n, k = map(int, sizes.split("x"))
    pairs = []
    for _ in range((16 << 20) // (4 * (m * k + k * n + m * n)) + 1):
        a = torch.rand(k, m).t() if "ta" in transposed else torch.rand(m, k)
        pairs.append((a, torch.rand(n, k).t() if "tb" in transposed else torch.rand(k, n)))
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        a, b = pairs[len(times) % len(pairs)]
        start = time.perf_counter()
        torch.mm(a, b)
        times.append(time.perf_counter() - start)
    times.sort()
    return [2 * m * n * k / times[len(times) // part] / 1e9 for part in (2, 10)]


def main():
    case, threads = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    if case == "products":
        fields = "gflops", "best_gflops"
        found = [{"product": name} | dict(zip(fields, product(name))) for name in map(str.strip, sys.stdin)]
        return print(json.dumps({"threads": threads, "products": found}))
    before = most_memory()
    model, (x, target) = (make() for make in CASES[case])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step():
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(x), target).backward()
        optimizer.step()

    for _ in range(2):
        step()
    times, end = [], time.perf_counter() + float(os.environ.get("SECONDS", 4))
    while len(times) < 7 or time.perf_counter() < end:
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    seconds, held = statistics.median(times), most_memory() - before

    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        step()
    answer = {"case": case, "threads": threads, "median_ms": 1e3 * seconds, "samples_per_s": len(x) / seconds}
    print(json.dumps(answer | {"gflops": counter.get_total_flops() / seconds / 1e9, "rss_bytes": held}))


if __name__ == "__main__":
    main()
