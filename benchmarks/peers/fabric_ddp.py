"""Lightning Fabric on CPU processes."""

from __future__ import annotations

import lightning_fabric
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments import TorchElasticEnvironment
from runner import parse_arguments, rank_and_world, serve
from torch_steps import VERSIONS, parts, plain_steps

if __name__ == "__main__":
    arguments = parse_arguments()
    rank, world_size = rank_and_world()
    fabric = Fabric(
        accelerator="cpu",
        strategy="ddp",
        devices=world_size,
        # The harness speaks torchrun's words; said outright, as Fabric guesses from more of them.
        plugins=[TorchElasticEnvironment()],
    )
    fabric.launch()
    if fabric.world_size != world_size:
        raise SystemExit(f"Fabric runs on {fabric.world_size} of {world_size} ranks")
    model, optimizer, batches = parts(arguments, rank, fused=None)
    wrapped, wrapped_optimizer = fabric.setup(model, optimizer)
    steps = plain_steps(wrapped, wrapped_optimizer, batches, fabric.backward)
    versions = {**VERSIONS, "lightning-fabric": lightning_fabric.__version__}
    serve(arguments, steps, rank=rank, versions=versions)
