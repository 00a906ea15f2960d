"""Tensor, sequence and expert parallelism of the native decoder: its modules on one of several ranks."""
