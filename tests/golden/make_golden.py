"""Ten training steps of a small CNN in PyTorch, for tests/golden.rs to be compared with.

usage: python make_golden.py          (needs torch, numpy and safetensors; writes <optimizer>_<dtype>.safetensors beside itself)

Each file holds start.*, end.* (parameters and running statistics, by our names and layouts) and losses[10] (means).
Inputs and starting weights are formulas, the same here and there, so that no generator matters: element i of tensor number k is
sin(0.37·i + 1.3·k + 0.5)·scale; the label of sample i at step t is (3·i + t) mod 4.
Layouts: images NCHW -> NHWC; convolutions [co,ci,kh,kw] -> [kh,kw,ci,co]; the flattened order of the linear layer's inputs
changes with the images' layout.
"""
import pathlib

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.numpy import save_file

STEPS, BATCH, SIZE, CLASSES = 10, 6, 7, 4


def formula(k, shape, scale):
    return scale * np.sin(0.37 * np.arange(np.prod(shape)) + 1.3 * k + 0.5).reshape(shape)


class Net(nn.Module):
    """conv 3x3 2->4, batch norm, relu, max pool 2, conv 3x3 stride 2 4->6, relu, flatten, dropout (off), linear 24->4.

    No bias before batch norm: its gradient is nothing but rounding, which Adam would blow up to steps of full size.
    """

    def __init__(self):
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.linear = nn.Conv2d(4, 6, 3, stride=2, padding=1), nn.Linear(24, CLASSES)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.conv1(x))), 2)
        x = F.relu(self.conv2(x)).flatten(1)
        return self.linear(F.dropout(x, 0.0))


def ours(net):
    """Parameters and state by our names, in our layouts."""
    conv = lambda w: w.permute(2, 3, 1, 0)
    linear = lambda w: w.reshape(CLASSES, 6, 2, 2).permute(0, 2, 3, 1).reshape(CLASSES, 24)
    t = {
        "conv2d1.weight": conv(net.conv1.weight),
        "batch_norm1.gamma": net.norm.weight, "batch_norm1.beta": net.norm.bias,
        "conv2d2.weight": conv(net.conv2.weight), "conv2d2.bias": net.conv2.bias,
        "linear1.weight": linear(net.linear.weight), "linear1.bias": net.linear.bias,
        "batch_norm1.running_mean": net.norm.running_mean, "batch_norm1.running_var": net.norm.running_var,
    }
    return {name: np.ascontiguousarray(v.detach().numpy()) for name, v in t.items()}


def main():
    optimizers = {
        "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.01),
        "nesterov": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
        "adam": lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.01),
        "adamw": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1),
    }
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for dtype, tag in [(torch.float64, "f64"), (torch.float32, "f32")]:
        for name, make in optimizers.items():
            net = Net().to(dtype)
            with torch.no_grad():
                for k, p in enumerate(net.parameters()):
                    p.copy_(torch.from_numpy(formula(k, p.shape, 0.3) + (1.0 if p is net.norm.weight else 0.0)))
            out = {f"start.{n}": v.copy() for n, v in ours(net).items()}
            optimizer, losses = make(net.parameters()), []
            for t in range(STEPS):
                image = formula(100 + t, [BATCH, SIZE, SIZE, 2], 1.0)
                x = torch.from_numpy(image).to(dtype).permute(0, 3, 1, 2).contiguous()
                label = torch.tensor([(3 * i + t) % CLASSES for i in range(BATCH)])
                optimizer.zero_grad()
                loss = F.cross_entropy(net(x), label, label_smoothing=0.1)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            out |= {f"end.{n}": v for n, v in ours(net).items()}
            out["losses"] = np.array(losses)
            save_file(out, pathlib.Path(__file__).parent / f"{name}_{tag}.safetensors")


main()
