"""Columns of rows from any source."""

from qtrain.core.errors import UserError, nearest


def missing_column(
    flag: str, where: str, column: str, columns: list[str], fix: str = "Set text_column to one."
) -> UserError:
    """The error for rows of `where` that lack `column`."""
    close = nearest(column, columns)
    hint = f" Did you mean {close!r}?" if close else ""
    return UserError(f"{flag}: {where} has no column {column!r}.{hint} Its columns: {', '.join(columns)}. {fix}")


def valid_unicode(text: str) -> str:
    """`text` with lone surrogates, which JSON can spell but UTF-8 cannot encode, replaced by U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
