"""Images in folders, such as one for each class, read by Pillow."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.data import FormatError

_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"}


def image_files(folder: Path) -> list[Path]:
    """Returns the images in a folder and its folders, sorted by their paths, without hidden ones."""
    files = (path for path in folder.rglob("*") if path.suffix.lower() in _SUFFIXES and path.is_file())
    return sorted(file for file in files if not any(part.startswith(".") for part in file.relative_to(folder).parts))


def read_images(files: Sequence[Path | bytes], names: Sequence[str]) -> np.ndarray:
    """Returns images ``uint8 [n, height, width, channels]``, with 1 channel if all are grey, and 3 otherwise.

    Args:
      files: the files, or their contents.
      names: what messages call them.

    Raises:
      ImportError: Pillow is not installed.
      FormatError: a file is damaged, has more than 8 bits per channel, or the images have different sizes.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("Folders of images need Pillow, which is not installed: pip install pillow.") from error
    images: list[Any] = []
    grey = True
    for file, name in zip(files, names, strict=True):
        try:
            with Image.open(io.BytesIO(file) if isinstance(file, bytes) else file) as image:
                if image.mode.startswith(("I", "F")):  # Their values would be clipped to 255.
                    raise FormatError(
                        f"{name} has more than 8 bits per channel (Pillow's mode {image.mode}): save the images with 8 bits "
                        "per channel, or give the values as an array in an .npz file."
                    )
                grey = grey and image.mode in ("1", "L", "LA")
                if images and image.size != images[0].size:
                    raise FormatError(
                        f"{name} has {image.size[0]} by {image.size[1]} pixels, and {names[0]} has {images[0].size[0]} by "
                        f"{images[0].size[1]}: resize the images to one size."
                    )
                images.append(image.convert("L" if grey else "RGB"))
        except (OSError, SyntaxError, ValueError) as error:
            if isinstance(error, FormatError):
                raise
            raise FormatError(f"{name}: truncated or damaged, or no image ({error}).") from None
    pixels = [np.asarray(image if image.mode == ("L" if grey else "RGB") else image.convert("RGB")) for image in images]
    stacked = np.stack(pixels)
    return stacked[..., np.newaxis] if grey else stacked
