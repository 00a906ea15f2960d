"""What a mesh of ranks does to a model: sharding (ZeRO, FSDP), gradients, sharded checkpoints."""
