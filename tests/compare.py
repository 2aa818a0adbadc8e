"""The one way in which tests compare floats: relative error of the whole tensor and of its worst row."""

import numpy as np


def relative_errors(got, expected) -> tuple[float, float]:
    """Return the relative error of the whole tensor and of its worst row, NaN where a value is not finite."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    assert got.shape == expected.shape, (got.shape, expected.shape)
    difference = np.linalg.norm(got - expected, axis=-1)
    size = np.linalg.norm(expected, axis=-1)
    # A row that must be zero has no relative error: any other value counts as infinitely wrong.
    rows = np.where(difference == 0, 0, difference / np.maximum(size, np.finfo(np.float64).tiny))
    return float(np.linalg.norm(difference) / np.linalg.norm(size)), float(rows.max())


def assert_close(got, expected, tolerance: float = 1e-5) -> None:
    """Assert that both relative errors are within `tolerance`; NaN never is."""
    whole, row = relative_errors(got, expected)
    assert whole <= tolerance and row <= tolerance, f"relative error {whole:.2e}, worst row {row:.2e}"  # noqa: PT018
