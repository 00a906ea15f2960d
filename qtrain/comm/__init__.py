"""Processes that talk: launcher, ranks, mesh, collectives, heartbeat. Knows torch.distributed and no model."""
