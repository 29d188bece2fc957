"""Compiles every .proto of this folder into a Python package whose modules import one another.

protoc writes absolute imports that assume the output folder is on sys.path. The generated package
lives inside snapshotter.rpc.pb, so those imports are rewritten to that prefix.
"""

from __future__ import annotations

import re
import sys
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

SOURCE = Path(__file__).resolve().parent
PREFIX = "snapshotter.rpc.pb"


def main(target: Path) -> None:
    files = sorted(SOURCE.rglob("*.proto"))
    newest = max(path.stat().st_mtime for path in [*files, Path(__file__)])
    stamp = target / "__init__.py"
    if stamp.exists() and stamp.stat().st_mtime >= newest:
        return
    target.mkdir(parents=True, exist_ok=True)
    well_known = str(resources.files("grpc_tools") / "_proto")
    command = [
        "protoc",
        f"-I{SOURCE}",
        f"-I{well_known}",
        f"--python_out={target}",
        f"--grpc_python_out={target}",
        *map(str, files),
    ]
    if protoc.main(command) != 0:
        sys.exit("protoc failed; see its messages above")
    roots = sorted({path.relative_to(SOURCE).parts[0] for path in files})
    pattern = re.compile(rf"^from ({'|'.join(roots)})(\.[\w.]+)? import", re.MULTILINE)
    for module in target.rglob("*_pb2*.py"):
        text = module.read_text()
        module.write_text(pattern.sub(rf"from {PREFIX}.\1\2 import", text))
    for folder in {p.parent for p in target.rglob("*.py")} | {target}:
        while folder != target.parent:
            (folder / "__init__.py").touch()
            folder = folder.parent
    stamp.touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
