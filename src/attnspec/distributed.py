"""The layer on several machines: a plan that splits its heads among ranks.

It is used as the plans of PyTorch are, and `fully_shard` (FSDP2) goes on top of it::

    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"attention": HeadParallel()})
    fully_shard(model, mesh=mesh["dp"])

`attnspec shapes --tp 4` shows what each rank has, and what crosses the network.
"""

from .layers.shards import HeadParallel as HeadParallel
