"""What a model's shape costs: parameters, FLOPs, memory."""
