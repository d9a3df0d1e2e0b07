"""Draws the pictures of docs/systems.md, decentralized.md and scale.md. Run ``python docs/write_pictures.py [systems]``."""

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import fedsim

PAGES = ("systems", "decentralized", "scale")


def main(*names: str) -> None:
    """Runs all Python blocks of each page in a temporary folder and copies the pictures from there.

    That of docs/scale.md is drawn from the committed results of ``python -m benchmarks.tpu``.
    """
    fedsim.use_all_cores(8)  # as many devices as in the tests, which run the pages, too
    for page in (Path(__file__).with_name(f"{name}.md") for name in names or PAGES):
        if page.stem == "scale":
            sys.path.insert(0, str(page.parents[1]))
            from benchmarks import tpu_page

            page.with_suffix("").mkdir(exist_ok=True)
            tpu_page.draw(page.with_suffix("") / "tpu.png")
            continue
        blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        page.with_suffix("").mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            namespace: dict[str, object] = {"__name__": "page"}
            for block in blocks:
                exec(block, namespace)
            for picture in Path(folder).glob("*.png"):
                shutil.copy(picture, page.with_suffix(""))
            os.chdir(page.parent)


if __name__ == "__main__":
    main(*sys.argv[1:])
