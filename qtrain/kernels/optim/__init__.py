"""Optimizer updates of many tensors in one launch, over states in 32 to 4 bits per element.
`state_formats.py` defines the states, `fused_update.py` the rules."""
