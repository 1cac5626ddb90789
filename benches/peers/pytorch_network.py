"""The other side of scripts/bench-network.sh: VGG-16 at 32×32 with a 4096-wide classifier over gloo, one process a host.

    pytorch_network.py data-parallel|1f1b SAMPLES     (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, GLOO_SOCKET_IFNAME are set)

An update takes SAMPLES samples: DistributedDataParallel, or a pipeline of two stages, cut where the compute is halved, with 4
micro-batches. The first rank prints samples per second.
"""
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from pytorch import vgg16

STEPS = 5
# The first module of the second stage.
CUT = 19


def main():
    mode, samples = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank, workers = dist.get_rank(), dist.get_world_size()
    model = vgg16(32, 4096, 10)
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
    if mode == "data-parallel":
        net = nn.parallel.DistributedDataParallel(model)
        x, y = torch.randn(samples // workers, 3, 32, 32), torch.randint(0, 10, (samples // workers,))

        def run():
            F.cross_entropy(net(x), y).backward()
    else:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B

        modules = list(model)
        net = nn.Sequential(*(modules[:CUT] if rank == 0 else modules[CUT:]))
        stage = PipelineStage(net, rank, workers, torch.device("cpu"))
        schedule = Schedule1F1B(stage, 4, loss_fn=F.cross_entropy)
        x, y = torch.randn(samples, 3, 32, 32), torch.randint(0, 10, (samples,))

        def run():
            schedule.step(x) if rank == 0 else schedule.step(target=y)

    optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
    times = []
    for _ in range(1 + STEPS):
        dist.barrier()
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        run()
        optimizer.step()
        dist.barrier()
        times.append(time.perf_counter() - start)
    if rank == 0:
        print(f"{samples / statistics.median(times[1:]):.1f} samples/s", flush=True)
    dist.destroy_process_group()


main()
