"""What `python -m qtrain NAME` runs: a module each, with a `main(argv)`."""

COMMANDS = {
    "evaluate": "measure a run, a checkpoint, an exported folder or a model of the hub",
    "export": "write one of these in low bits, with the codes that training multiplied with",
    "generate": "write text with one of these, in batches or as a chat",
    "report": "draw a run as an HTML page, compare several, or follow one that trains",
}
"""Name -> what it does."""
