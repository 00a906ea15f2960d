"""Hugging Face folders: read, loaded, exported; models that transformers itself runs."""
