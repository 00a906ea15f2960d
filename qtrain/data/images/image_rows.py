"""Images as rows of a table, through the `datasets` library: a dataset of the hub, or local parquet files.

The library stores the rows as memory-mapped Arrow files in its cache, which give random access.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from qtrain.core.checks import MAX_INT
from qtrain.core.errors import UserError, unknown_name
from qtrain.data.files import as_list, match_globs
from qtrain.data.hub_rows import RowSource, missing_column
from qtrain.data.images.images import IMAGE_SETS, Images, ImageSet, class_names, decode

if TYPE_CHECKING:
    import datasets

FIX = "Check the name, or use local images: the dataset types image_folder, parquet, wds and sklearn:digits."


class _Rows(Images):
    def __init__(self, rows: "datasets.Dataset", image_column: str, label_column: str, what: str, flag: str):
        import datasets

        feature = rows.features[label_column]
        if rows.features[image_column] == datasets.Image():
            # Bytes as stored: decoding is done here, with our own limits and messages.
            rows = rows.cast_column(image_column, datasets.Image(decode=False))
        self._rows = rows.select_columns([image_column])
        self._column, self._what, self._flag = image_column, what, flag
        # All labels at once, without decoding an image.
        values: Any = rows.with_format("arrow").select_columns([label_column])[:][label_column]
        if values.null_count:
            raise UserError(f"{flag}: the column {label_column!r} of {what} has rows without a label.")
        values = values.to_numpy()  # int64 or objects [rows]
        if np.issubdtype(values.dtype, np.integer):
            if len(values) and int(values.max()) > MAX_INT:
                raise UserError(f"{flag}: the label {int(values.max())} of {what} is too large.")
            self.labels = values.astype(np.int64)
            self.classes = class_names(self.labels, getattr(feature, "names", None), flag)
        elif all(isinstance(value, str) for value in values):
            self.classes = tuple(sorted(set(values)))
            # The place of each name among the sorted classes.
            self.labels = np.searchsorted(np.array(self.classes), values.astype(str)).astype(np.int64)
        else:
            raise UserError(f"{flag}: the column {label_column!r} of {what} holds neither whole numbers nor names.")

    def name(self, index: int) -> str:
        return f"row {index} of {self._what}"

    def read(self, index: int) -> Image.Image:
        value, name = self._rows[index][self._column], self.name(index)
        data = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(data, bytes):
            raise UserError(f"{self._flag}: {name} has no image bytes in the column {self._column!r}.")
        return decode(data, name, self._flag)


def _open(source: RowSource, what: str, image_column: str, label_column: str, flag: str) -> Images:
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # its complaints become one UserError
    datasets.disable_progress_bars()
    with source.reading(flag):
        try:
            splits: Any = datasets.load_dataset(source.dataset, source.subset, data_files=source.data_files)
        except datasets.exceptions.DatasetGenerationError as error:
            raise ValueError(str(error.__cause__ or error)) from None
    if source.split not in splits:
        raise unknown_name(flag, f"split of {what}", source.split, map(str, splits))
    rows = splits[source.split]
    for key, column in (("image_column", image_column), ("label_column", label_column)):
        if column not in rows.column_names:
            raise missing_column(flag, what, column, rows.column_names, f"Set {key} to one.")
    return _Rows(rows, image_column, label_column, what, flag)


@IMAGE_SETS.register("hf_image")
@dataclass(frozen=True)
class HubImages(ImageSet):
    """An image dataset of the Hugging Face hub, downloaded into its cache"""

    dataset: str = "timm/resisc45"
    """hub id"""
    subset: str | None = None
    """subset (configuration) of the dataset"""
    split: str = "train"
    """split of the dataset"""
    image_column: str = "image"
    """column of the images"""
    label_column: str = "label"
    """column of the labels, whole numbers or names"""

    def open(self, flag: str) -> Images:
        source = RowSource(self.dataset, self.subset, self.split, (), None, records=True, fix=FIX)
        return _open(source, f"the dataset {self.dataset!r}", self.image_column, self.label_column, flag)


@IMAGE_SETS.register("parquet")
@dataclass(frozen=True)
class ParquetImages(ImageSet):
    """Local parquet files with a column of image bytes and one of labels"""

    paths: str | list[str]
    """files or globs"""
    image_column: str = "image"
    """column of the images: bytes, or {bytes, path}"""
    label_column: str = "label"
    """column of the labels, whole numbers or names"""

    def open(self, flag: str) -> Images:
        files, patterns = match_globs(self.paths, flag), as_list(self.paths)
        source = RowSource("parquet", None, "train", (), files, records=True)
        what = f"{patterns[0]!r}" if len(patterns) == 1 else f"{len(files)} parquet files"
        return _open(source, what, self.image_column, self.label_column, flag)
