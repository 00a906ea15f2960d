"""Text from a model: prompts in batches, a static KV cache, sampling on the device, text in pieces."""
