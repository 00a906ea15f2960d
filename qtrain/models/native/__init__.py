"""The native decoder, module by module."""
