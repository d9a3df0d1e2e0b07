"""Draws the pictures of docs/systems.md, by running the code of the page. Run ``python docs/write_systems.py``."""

import os
import re
import shutil
import tempfile
from pathlib import Path

PAGE = Path(__file__).with_name("systems.md")


def main() -> None:
    """Runs all Python blocks of the page in a temporary folder and copies the pictures from there."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        namespace: dict[str, object] = {"__name__": "page"}
        for block in blocks:
            exec(block, namespace)
        for picture in Path(folder).glob("*.png"):
            shutil.copy(picture, PAGE.with_suffix(""))
        os.chdir(PAGE.parent)


if __name__ == "__main__":
    main()
