"""How files of a user's own are read: the columns of a table, and the pixels of images, by public constants only.

Sites rarely agree on how they write the same thing. What differs is never guessed from the rows, because a guess that
one row can tip would change the features of all others. It is refused, and the error names the key that reads it.
"""

from __future__ import annotations

import math
import unicodedata
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from flower_privdec.common.errors import ArgumentError, did_you_mean
from flower_privdec.common.fields import Count, Section

# What the best known programs write in the place of a missing value. A word that may be a category is not among them.
MISSING_VALUES = ("", "NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "NULL", "null", "?")


def _pair_of(what: str, example: str) -> BeforeValidator:
    """Return a validator that takes a list of two."""

    def check(value: Any) -> Any:
        if not isinstance(value, list | tuple) or len(value) != 2:
            raise ArgumentError(f"must be {what}, as {example}", code="table.scaling")
        return tuple(value)

    return BeforeValidator(check)


def _mark(value: Any) -> Any:
    """Return a delimiter; YAML reads '\\t' in single quotes, or without any, as two characters."""
    return {"\\t": "\t", "tab": "\t"}.get(value, value) if isinstance(value, str) else value


Scaling = Annotated[tuple[float, float], _pair_of("a center and a scale", "[40, 20]")]
Bounds = Annotated[tuple[float, float], _pair_of("a least and a largest value", "[0, 120]")]
Window = Annotated[tuple[float, float], _pair_of("a center and a width", "[40, 400]")]
Size = Annotated[tuple[Count, Count], _pair_of("a height and a width", "[224, 224]")]


def composed(text: str) -> str:
    """Return a text whose accents are written in one way: some systems write a letter and its accent as two signs."""
    return unicodedata.normalize("NFC", text)


class TableSection(Section):
    """Which columns of a table are features, and by which public constants they become numbers.

    Means, deviations and categories that are computed from private rows are releases that no ledger counts: name what
    is known without them.

    Attributes:
        target: the column of what is learned: a class (see data.labels), or a number.
        target_scale: a center and a scale of a target that is a number: the model learns (target - center) / scale.
        numbers: for each column of numbers a center and a scale: the feature is (value - center) / scale.
        categories: for each column of categories all that there are: a feature for each, 1 where a row has it.
        bounds: for a column of numbers the least and the largest value that can be right: others, such as those in
            another unit, are refused.
        rename: what columns are called in some files, and what they are called here: {Age: age, "AGE (y)": age}.
        spellings: for a column of categories, or the target, what some files write, and which listed one it is:
            {sex: {male: m, female: f}}.
        ignore_case: whether categories, classes and missing_values are the same in capitals and small letters.
        missing: what happens if a value is missing, or a file lacks a column: refused; center, it counts as the
            center, or as no category; flag, it does too, and one more feature for each column is 1 where it is missing.
        missing_values: the texts that stand for a missing value, beside an empty one; -999 also stands for -999.0.
        missing_codes: for a column, more of them that hold in it alone, as a survey's codes do: {income: ["-1", "99"]}.
        decimal: the mark before the decimals of a number in a text: "." or ","; either, whichever a number has, and
            one that could be thousands, as 1,234, is refused.
        thousands: the mark between the thousands of a number in a text: one of , . ' or a space; left out, none.
        delimiter: of CSV: one character; auto, whichever of , ; | and a tab gives a header with these columns.
        encoding: of CSV.
    """

    target: str
    target_scale: Scaling | None = None
    numbers: dict[str, Scaling] = Field(default_factory=dict)
    categories: dict[str, list[str]] = Field(default_factory=dict)
    bounds: dict[str, Bounds] = Field(default_factory=dict)
    rename: dict[str, str] = Field(default_factory=dict)
    spellings: dict[str, dict[str, str]] = Field(default_factory=dict)
    ignore_case: bool = False
    missing: Literal["refused", "center", "flag"] = "refused"
    missing_values: list[str] = Field(default_factory=lambda: list(MISSING_VALUES))
    missing_codes: dict[str, list[str]] = Field(default_factory=dict)
    decimal: Literal[".", ",", "either"] = "."
    thousands: Literal[",", ".", " ", "'"] | None = None
    delimiter: Annotated[
        Annotated[str, Field(min_length=1, max_length=1)] | Literal["auto"], BeforeValidator(_mark)
    ] = ","
    encoding: Literal[
        "utf-8", "utf-16", "latin-1", "iso8859-15", "cp1250", "cp1251", "cp1252", "cp1253", "gb18030", "shift_jis"
    ] = "utf-8"

    def folded(self, text: str) -> str:
        """Return a text as it is compared."""
        text = composed(text.strip())
        if self.ignore_case:
            text = " ".join(text.casefold().split())
        return text

    def _check(self) -> None:
        names = [self.target, *self.numbers, *self.categories]
        if len(names) < 2 or len(set(names)) < len(names):
            raise ArgumentError(
                "numbers and categories must name one column at least, each once, and not the target",
                code="table.columns",
            )
        self._check_constants()
        for name, listed in self.categories.items():
            if not listed:
                raise ArgumentError(
                    f"categories.{name} must list each category once, and one at least", code="table.categories"
                )
            self.check_listed(f"categories.{name}", name, listed)

        for column, name in self.rename.items():
            if name not in names or column.strip() in names:
                raise ArgumentError(
                    f"rename.{column}={name!r} must be a column that numbers, categories or target name, and "
                    f"{column!r} none of them{did_you_mean(name, names)}",
                    code="table.rename",
                )
        for name in self.spellings:
            if name not in self.categories and name != self.target:
                raise ArgumentError(
                    f"spellings.{name} must be of a column of categories, or of the target"
                    f"{did_you_mean(name, [self.target, *self.categories])}",
                    code="table.spellings",
                )

        for name in self.missing_codes:
            if name not in names:
                raise ArgumentError(
                    f"missing_codes.{name} must be of a column that numbers, categories or target name"
                    f"{did_you_mean(name, names)}",
                    code="table.missing-values",
                )

        marks = {",", "."} if self.decimal == "either" else {self.decimal}
        if self.thousands in marks:
            raise ArgumentError(
                f"thousands={self.thousands!r} and decimal={self.decimal!r} are the same mark: change one of them",
                code="table.marks",
            )

    def _check_constants(self) -> None:
        scalings = dict(self.numbers)
        if self.target_scale is not None:
            scalings["target_scale"] = self.target_scale
        for name, (center, scale) in scalings.items():
            if not (math.isfinite(center) and math.isfinite(scale) and scale > 0):
                raise ArgumentError(
                    f"{name} has center {center} and scale {scale}, which must be finite, the scale > 0: constants "
                    "that are public, for those of private rows are a release",
                    code="table.scale",
                )

        for name, (least, most) in self.bounds.items():
            if name not in self.numbers and name != self.target:
                raise ArgumentError(
                    f"bounds.{name} must be of a column of numbers{did_you_mean(name, self.numbers)}",
                    code="table.bounds",
                )
            if not least < most:
                raise ArgumentError(
                    f"bounds.{name}=[{least}, {most}] must be a least and a largest value, and the first is not less: "
                    "change them",
                    code="table.bounds",
                )

    def check_listed(self, key: str, name: str, listed: list[str]) -> None:
        """Refuse categories or classes that cannot be told apart, or that count as missing.

        Args:
            key: of the list.
            name: of its column.
        """
        folded = [self.folded(text) for text in listed]
        if len(set(folded)) < len(folded):
            raise ArgumentError(f"{key} must list each category once, and one at least", code="table.categories")

        missing = {self.folded(text) for text in self.missing_values}
        codes = {self.folded(text) for text in self.missing_codes.get(name, ())}
        for text, plain in zip(listed, folded, strict=True):
            if not plain or plain in codes:
                raise ArgumentError(
                    f"{key} lists {text!r}, which counts as missing: take it out of the list, or out of "
                    f"missing_codes.{name}",
                    code="table.missing-values",
                )
            if plain in missing:
                rest = [code for code in self.missing_values if self.folded(code) != plain]
                raise ArgumentError(
                    f"{key} lists {text!r}, which missing_values counts as missing: set "
                    f"data.table.missing_values={rest}, or take it out of the list",
                    code="table.missing-values",
                )

        for spelling, text in self.spellings.get(name, {}).items():
            if self.folded(text) not in folded:
                raise ArgumentError(
                    f"spellings.{name}.{spelling}={text!r} must be one that {key} lists{did_you_mean(text, listed)}",
                    code="table.spellings",
                )


class ImagesSection(Section):
    """How image files are read.

    Attributes:
        window: a center and a width, in the numbers that files hold (of DICOM after rescaling, as Hounsfield units):
            grey images become [1, height, width], black at center - width / 2 and white at center + width / 2. Grey
            DICOM and images of more than 8 bits need it; left out, images of 8 bits become RGB. Take what is usual for
            the device or the organ, never the data's own: [40, 400] for soft tissue in CT, [2048, 4096] for 12 bits.
        nested: whether files in folders below a class's are its examples too, as where each patient has a folder.
        size: a height and a width to which each image is resized; left out, all must have one size.
    """

    window: Window | None = None
    nested: bool = False
    size: Size | None = None

    def _check(self) -> None:
        if self.window is None:
            return
        center, width = self.window
        if not (math.isfinite(center) and math.isfinite(width) and width > 0):
            raise ArgumentError(
                f"window has center {center} and width {width}, which must be finite, the width > 0",
                code="images.window",
            )
