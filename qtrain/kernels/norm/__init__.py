"""Norms with what is fused around them."""
