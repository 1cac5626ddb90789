"""What attention and LSTM give in PyTorch, with their gradients, for tests/sequences.rs to be compared with.

usage: python make_sequences.py       (needs torch, numpy and safetensors; writes sequences_<dtype>.safetensors beside itself)

Each file holds, for every case, the outputs y (and h, c) and the gradients d<input> and d<parameter> of the sum of the outputs
times weights that are formulas, by our names. Element i of tensor number k is sin(0.37·i + 1.3·k + 0.5)·scale: the inputs are
tensors 0, 1, … of scale 1, the parameters 10, 11, … of scale 0.5, the weights of the outputs 20, 21, … of scale 1.
Our layouts are PyTorch's.
"""
import pathlib

import numpy as np
import torch
import torch.nn as nn
from safetensors.numpy import save_file

N, T, D, HEADS, INPUTS, UNITS = 2, 7, 12, 3, 5, 4


def formula(k, shape, scale, dtype):
    values = scale * np.sin(0.37 * np.arange(np.prod(shape)) + 1.3 * k + 0.5).reshape(shape)
    return torch.from_numpy(values).to(dtype)


def attention(causal):
    def run(layer, x):
        mask = nn.Transformer.generate_square_subsequent_mask(T, dtype=x.dtype) if causal else None
        return [layer(x, x, x, need_weights=False, attn_mask=mask, is_causal=causal)[0]]

    names = {"in_proj_weight": "in_weight", "in_proj_bias": "in_bias", "out_proj.weight": "out_weight", "out_proj.bias": "out_bias"}
    return nn.MultiheadAttention(D, HEADS, batch_first=True), names, [[N, T, D]], run


def lstm(started):
    def run(layer, x, *state):
        y, (h, c) = layer(x, tuple(s[None] for s in state) if state else None)
        return [y, h[0], c[0]]

    names = {f"{kind}_{which}_l0": f"{kind}_{which}" for kind in ["weight", "bias"] for which in ["ih", "hh"]}
    states = [[N, UNITS], [N, UNITS]] if started else []
    return nn.LSTM(INPUTS, UNITS, batch_first=True), names, [[N, T, INPUTS], *states], run


def main():
    cases = {
        "attention": lambda: attention(False),
        "causal": lambda: attention(True),
        "lstm": lambda: lstm(False),
        "lstm_with_a_state": lambda: lstm(True),
    }
    torch.set_num_threads(1)
    for dtype, tag in [(torch.float64, "f64"), (torch.float32, "f32")]:
        out = {}
        for case, make in cases.items():
            layer, names, shapes, run = make()
            layer = layer.to(dtype)
            params = dict(layer.named_parameters())
            with torch.no_grad():
                for k, name in enumerate(names):
                    params[name].copy_(formula(10 + k, params[name].shape, 0.5, dtype))
            inputs = [formula(k, shape, 1.0, dtype).requires_grad_() for k, shape in enumerate(shapes)]
            outputs = run(layer, *inputs)
            sum((y * formula(20 + k, y.shape, 1.0, dtype)).sum() for k, y in enumerate(outputs)).backward()
            out |= {f"{case}.output{k}": y for k, y in enumerate(outputs)}
            out |= {f"{case}.dinput{k}": x.grad for k, x in enumerate(inputs)}
            out |= {f"{case}.d{names[name]}": params[name].grad for name in names}
        host = {name: np.ascontiguousarray(t.detach().numpy()) for name, t in out.items()}
        save_file(host, pathlib.Path(__file__).parent / f"sequences_{tag}.safetensors")


main()
