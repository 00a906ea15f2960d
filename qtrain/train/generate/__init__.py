"""What `python -m qtrain generate` is made of."""
