"""Shared by the examples on digits: arguments, the data, a judge, a picture."""

import argparse
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split

PIXELS = 64  # 8 x 8
LEAST_SHARE = 0.05  # of the samples, for a class to count as found; an equal share is 0.1


def parser(description: str, steps: int, short: int) -> argparse.ArgumentParser:
    """Return the parser of an example with `steps` generator steps, `short` with `--short`."""
    command = argparse.ArgumentParser(description=description)
    length = command.add_mutually_exclusive_group()
    text = "generator steps (%(default)s)"
    length.add_argument("--steps", type=integer(1), default=steps, metavar="N", help=text)
    text = f"only {short} steps, and no required quality"
    length.add_argument("--short", action="store_true", help=text)
    text = "seed of the networks and the data (%(default)s)"
    command.add_argument("--seed", type=integer(0), default=0, metavar="N", help=text)
    text = "save a grid of generated digits"
    command.add_argument("--save", type=_writable_png, metavar="PNG", help=text)
    return command


def integer(low: int, high: int = 10**9) -> Callable[[str], int]:
    """Return the type of an argument that is an integer from `low` to `high`."""

    def convert(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            rule = f"must be an integer from {low} to {high}"
            raise argparse.ArgumentTypeError(f"{rule}, got {text!r}")
        return int(text)

    return convert


def _writable_png(text: str) -> Path:
    # checked now rather than after training
    path = Path(text)
    if path.suffix != ".png" or path.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file that ends in .png, got {text!r}")
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("needs matplotlib: pip install 'elche_jax[examples]'")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"must be in a folder that can be made: {error}") from None
    return path


class Quality(NamedTuple):
    """How similar samples are to the digits; 1, 10 and 1 would be perfect."""

    covariance: float
    """Correlation between the entries of the samples' and the real digits' pixel covariances."""
    classes: int
    """Number of the ten classes that the classifier finds among the samples."""
    confidence: float
    """Mean probability of the class that the classifier chooses."""

    def __str__(self) -> str:
        covariance, classes, confidence = self
        return f"covariance {covariance:.3f}, classes {classes}/10, confidence {confidence:.3f}"

    def reaches(self, wanted: "Quality") -> bool:
        """Return whether all three reach their required values."""
        return all(got >= least for got, least in zip(self, wanted, strict=True))


class Judge:
    """Rates samples by comparison with real digits that neither player has seen.

    No single figure suffices. Normal noise fitted to the digits has their covariance and
    all classes, but leaves the classifier uncertain; one good digit repeated makes the
    classifier certain, but has a different covariance and a single class.
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray):
        self._covariance = np.cov(images.T).ravel()
        self._classifier = LogisticRegression(max_iter=2000).fit(images, labels)

    def __call__(self, samples: np.ndarray) -> Quality:
        """Return the quality of samples `(n, PIXELS)`."""
        if not np.isfinite(samples).all():
            return Quality(np.nan, 0, np.nan)
        covariance = np.corrcoef(self._covariance, np.cov(samples.T).ravel())[0, 1]
        chances = self._classifier.predict_proba(samples)
        shares = np.bincount(chances.argmax(axis=1), minlength=10) / len(samples)
        return Quality(covariance, int((shares >= LEAST_SHARE).sum()), chances.max(axis=1).mean())


def labelled() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return 1,504 labelled digits for training, and the other 293 for testing.

    Returns:
        Two dicts of `image`, `(n, 8, 8, 1)` from 0 to 1, and `label`, `(n,)`.
    """
    digits = load_digits()
    images = (digits.images[..., None] / 16).astype("float32")
    labels = digits.target.astype("int32")
    parts = train_test_split(images, labels, train_size=1504, stratify=labels, random_state=0)
    return {"image": parts[0], "label": parts[2]}, {"image": parts[1], "label": parts[3]}


def load() -> tuple[np.ndarray, Judge]:
    """Return 1,197 digits for training, and a judge based on the other 600.

    Returns:
        Images `(n, PIXELS)`, float32, from -1 (paper) to 1 (ink), and the judge.
    """
    images, labels = load_digits(return_X_y=True)
    images = (images / 8 - 1).astype("float32")
    seen, unseen, _, labels = train_test_split(
        images, labels, test_size=600, stratify=labels, random_state=0
    )
    return seen, Judge(unseen, labels)


def compare(judge: Judge, real: np.ndarray, samples: np.ndarray, wanted: Quality | None) -> int:
    """Print the quality of the samples, beside that of real digits and of fitted noise.

    Returns:
        The exit code: 1 if the samples do not reach the required quality, else 0.
    """
    rng = np.random.default_rng(0)
    noise = rng.multivariate_normal(real.mean(axis=0), np.cov(real.T), len(real)).clip(-1, 1)
    quality = judge(samples)
    print(f"real digits   {judge(real)}\ngenerated     {quality}\nfitted noise  {judge(noise)}")
    if wanted is not None and not quality.reaches(wanted):
        print(f"generated digits must reach {wanted}, got {quality}", file=sys.stderr)
        return 1
    return 0


def save_grid(samples: np.ndarray, path: Path) -> None:
    """Draw the first 200 of the samples `(n, PIXELS)`, 20 per row."""
    from matplotlib.image import imsave

    cells = samples[:200].reshape(10, 20, 8, 8)
    cells = np.pad(cells, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=-1)
    grid = cells.swapaxes(1, 2).reshape(100, 200)
    imsave(path, np.kron(grid, np.ones((4, 4))), cmap="gray_r", vmin=-1, vmax=1)
    print(f"picture: {path}")
