"""Processes that look at strangers' indexes: they go first, not what they were started by."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from snapshotter.image.adopter import Order
from snapshotter.image.adoption import Claim
from snapshotter.image.apart import FIRST_TO_GO
from tests.unit.image.layers import index_of

PLAIN = b"plain " * 1000


@pytest.mark.parametrize("module", ["snapshotter.image.adopter", "snapshotter.imagefs.rederiving"])
def test_it_is_the_first_to_be_killed_for_want_of_memory(tmp_path: Path, module: str) -> None:
    index = index_of(PLAIN, PLAIN, tmp_path)
    claim = Claim(index.layer, index.diff_id, index.blob_bytes, index.windows_bytes)
    order = Order(tmp_path / f"{index.layer.hex}.idx", claim, 1024**3).encode()
    if module.endswith("rederiving"):
        view = tmp_path / "view"
        view.write_bytes(PLAIN)
        order = f'["{tmp_path / index.layer.hex}.idx", "{view}", {1024**3}]'
    program = (
        f"import sys; from {module} import main; main(sys.argv[1]);"
        "print(); print(open('/proc/self/oom_score_adj').read())"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, order], capture_output=True, text=True, check=True
    )
    assert ran.stdout.split()[-1] == str(FIRST_TO_GO)


def test_the_unit_does_not_end_the_daemon_for_it() -> None:
    unit = Path(__file__).parents[3] / "systemd" / "ember.service"
    assert "\nOOMPolicy=continue\n" in unit.read_text()
