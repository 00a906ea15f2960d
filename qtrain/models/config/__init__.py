"""What a model's config says, and how it is read."""
