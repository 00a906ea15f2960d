"""Many processes as one training run: ranks, the mesh, the wire, and parameters sharded over ranks.

Knows torch.distributed and how weights are stored; nothing of training.
"""
