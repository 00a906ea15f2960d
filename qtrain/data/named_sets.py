"""Datasets of the hub by short names, with what a user wants to know before a download: licence and size.

Figures are those of the datasets' cards. What cards do not say, such as rights in the texts themselves, is not said
here either.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class NamedSet:
    """A dataset of text on the hub. max_tokens: how many tokens of it the name means; 0: all."""

    hub_id: str
    subset: str | None
    licence: str
    size: str
    text_column: str = "text"
    max_tokens: int = 0

    def describe(self) -> str:
        limit = f"; the first {self.max_tokens / 1e9:g} B tokens" if self.max_tokens else ""
        return f"{' '.join(filter(None, [self.hub_id, self.subset]))}; {self.licence}; {self.size}{limit}"


NAMED_SETS = {
    "tiny-shakespeare": NamedSet("Trelis/tiny-shakespeare", None, "text in the public domain", "1.1 MB", "Text"),
    "tinystories": NamedSet("roneneldan/TinyStories", None, "CDLA-Sharing-1.0", "1 GB, 2.1 M stories"),
    "openwebtext": NamedSet("Skylion007/openwebtext", None, "CC0-1.0", "13 GB, 8.0 M documents"),
    "fineweb-edu": NamedSet("HuggingFaceFW/fineweb-edu", "sample-10BT", "ODC-BY-1.0", "29 GB, 10 B tokens"),
    "c4": NamedSet("allenai/c4", "en", "ODC-BY-1.0", "305 GB, 365 M documents"),
    "c4-realnewslike": NamedSet("allenai/c4", "realnewslike", "ODC-BY-1.0", "15 GB, 13.8 M documents"),
    "climb-10b": NamedSet(
        "karpathy/climbmix-400b-shuffle",
        None,
        "CC-BY-NC-4.0 (nvidia/ClimbMix)",
        "400 B tokens, streamed as far as it is read",
        max_tokens=10_000_000_000,
    ),
}
"""Underscores mean the same as hyphens."""


def named_set(name: str) -> NamedSet | None:
    return NAMED_SETS.get(name.lower().replace("_", "-"))
