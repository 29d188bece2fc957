"""The table of the demo: medians, ratios to the first row, shares of the compressed image."""

from __future__ import annotations

from pathlib import Path

from bench.bed.image import Image, Layer
from bench.trial import Row, Trial, table

LAYER = Layer("sha256:aa", "sha256:bb", 200_000_000, 500_000_000, "tar")
IMAGE = Image("bed/x", "gzip", Path("/nowhere"), "sha256:cc", (LAYER,))
BASE = Row("overlayfs", (Trial(10.0, 20.0, 200_000_000),))


def test_a_row_is_the_median_of_its_trials() -> None:
    row = Row("x", (Trial(1, 2, 30), Trial(3, 9, 10), Trial(2, 4, 20)))
    assert (row.pull_s, row.ready_s, row.fetched_bytes) == (2, 4, 20)


def test_the_table_compares_with_its_first_row() -> None:
    heading, *rows = table([BASE, Row("lazy", (Trial(0.5, 3.0, 20_000_000),))], IMAGE)
    assert heading[3] == "of overlayfs"
    assert rows[0] == ["overlayfs", "10.00", "20.00", "1.00", "200.0", "100.0 %"]
    assert rows[1] == ["lazy", "0.50", "3.00", "0.15", "20.0", "10.0 %"]


def test_a_row_without_a_pull_shows_none() -> None:
    _, _, row = table([BASE, Row("all local", (Trial(0.0, 0.5, 0),))], IMAGE)
    assert row[1] == "–"
    assert row[4] == "0.0"


def test_the_document_has_the_ratio_and_the_share() -> None:
    document = Row("lazy", (Trial(0.5, 3.0, 20_000_000),)).document(BASE, IMAGE)
    assert document["ready_of_base"] == 0.15
    assert document["share_of_image"] == 0.1
