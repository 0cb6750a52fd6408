"""GPT-2 of torch_gpt.py on several GPUs of one machine: DistributedDataParallel, or fully sharded (FSDP2).

    torchrun --nproc-per-node 2 torch_distributed.py --batch 8,32 --commit abc1234 --note "driver ..."
    torchrun --nproc-per-node 2 torch_distributed.py --batch 8 --way fsdp ...
    torchrun --nproc-per-node 2 torch_distributed.py --all-reduce

Needs torch_gpt.py beside it. `--batch` is of each GPU, tokens a second are those of all. `--all-reduce` times sums of
as many numbers as GPT-2 has parameters, and of fewer.
"""

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import torch_gpt


class WithLoss(nn.Module):
    """A model that returns its loss, so that one compiled graph has both."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, inputs, targets):
        return nn.functional.cross_entropy(self.model(inputs).flatten(0, -2).float(), targets.flatten())


class Training(torch_gpt.Training):
    """torch_gpt's, of a model that is spread over the ranks."""

    def __init__(self, model, args):
        super().__init__(model, args)
        if args.way == "fsdp":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
            for block in self.model.blocks["layers"]:
                # Gathering breaks the graph between blocks.
                block.compile()
                fully_shard(block, mp_policy=policy)
            fully_shard(self.model, mp_policy=policy)
            # Its parameters are new ones.
            for group, chosen in zip(self.optimizer.param_groups, (lambda p: p.dim() > 1, lambda p: p.dim() <= 1)):
                group["params"] = [p for p in self.model.parameters() if chosen(p)]
            self.loss = WithLoss(self.model)
            return
        device = torch.cuda.current_device()
        spread = nn.parallel.DistributedDataParallel(
            WithLoss(self.model), device_ids=[device], gradient_as_bucket_view=True
        )
        compiled = spread if args.mode == "eager" else torch.compile(spread)

        def loss(inputs, targets):
            with torch.autocast("cuda", torch.bfloat16, enabled=args.precision == "amp"):
                return compiled(inputs, targets)

        self.loss = loss


def measure(args, batch):
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    torch_gpt.forget(args)
    model = torch_gpt.Gpt(12, 768, 12, 1024, torch_gpt.PADDED)
    training = Training(model, args)
    torch.manual_seed(rank)
    data = [tuple(torch.randint(0, torch_gpt.VOCABULARY, (batch, 1024), device="cuda") for _ in range(2))]
    first, times = torch_gpt.timed(lambda: training.step(data), args)
    if rank == 0:
        name = {"ddp": "DDP", "fsdp": "FSDP2, gradients and gathered parameters in bf16"}[args.way]
        notes = [f"{name}, {size} GPUs, total; vocabulary 50304, q, k and v fused, no clipping"]
        shape = f"B{batch}T1024 x{size}" + ("" if args.way == "ddp" else " fsdp")
        torch_gpt.print_row(args, "gpt2", shape, size * batch * 1024, "tokens/s", notes, first, times)


def all_reduce(args):
    size = dist.get_world_size()
    for count in (1_000_000, 8_000_000, 163_037_184):
        for dtype in (torch.bfloat16, torch.float32):
            numbers = torch.ones(count, device="cuda", dtype=dtype)
            for _ in range(5):
                dist.all_reduce(numbers)
            times = []
            for _ in range(5):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                for _ in range(20):
                    dist.all_reduce(numbers)
                torch.cuda.synchronize()
                times.append((time.perf_counter() - begin) / 20)
            if dist.get_rank() == 0:
                median = statistics.median(times)
                moved = 2 * (size - 1) / size * count * numbers.element_size()
                print(f"all-reduce\t{count}\t{dtype}\t{1e3 * median:.3f} ms\t{moved / median / 1e9:.0f} GB/s", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    torch_gpt.add_options(parser)
    parser.add_argument("--way", choices=["ddp", "fsdp"], default="ddp")
    parser.add_argument("--all-reduce", action="store_true", help="time sums alone")
    args = parser.parse_args()
    args.steps = args.steps or 20
    torch.set_float32_matmul_precision("high")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    if args.all_reduce:
        all_reduce(args)
    else:
        for batch in args.batch.split(","):
            measure(args, int(batch))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
