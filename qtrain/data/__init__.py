"""Data: token shards, text, mixtures, examples, images and tokenizers; streams that resume exactly; the loaders.

Import order: tokenizers < this folder's own files < text, examples, images. Whoever reads text or writes shards needs
no torch.
"""
