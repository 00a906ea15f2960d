"""The scripts as modules of the package, for the console commands and `python -m qtrain.scripts.llm_pretrain`.

The files are links to the scripts at the root of a clone; a wheel has copies in their place. Links, so that editors,
type checkers and setuptools find them where Python does.
"""
