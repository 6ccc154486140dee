"""Lightning Fabric on CPU processes."""

from __future__ import annotations

import lightning_fabric
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments import TorchElasticEnvironment
from runner import parse_arguments, rank_and_world, serve
from torch.nn.parallel import DistributedDataParallel
from torch_steps import VERSIONS, parts, plain_steps

if __name__ == "__main__":
    arguments = parse_arguments()
    rank, world_size = rank_and_world()
    # The harness speaks torchrun's words; said outright, as Fabric guesses from more of them.
    environment = TorchElasticEnvironment()
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=world_size, plugins=[environment])
    fabric.launch()
    made = parts(arguments, rank, loader=True)
    model, optimizer = fabric.setup(made.model, made.optimizer)
    if not any(isinstance(each, DistributedDataParallel) for each in model.modules()):
        raise SystemExit("Fabric did not wrap the model in DDP: its ranks train alone")
    steps = plain_steps(model, optimizer, made.batches, fabric.backward)
    versions = {**VERSIONS, "lightning-fabric": lightning_fabric.__version__}
    serve(arguments, steps, rank=rank, versions=versions)
