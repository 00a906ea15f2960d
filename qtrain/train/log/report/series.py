"""Curves made small enough to draw: smoothing over all points first, then few points that keep every extreme."""

import itertools

import numpy as np

from qtrain.train.log.report.records import Curve

MAX_POINTS = 1000
"""Points of a drawn curve: more than a chart has pixels."""


def extremes(y: np.ndarray, most: int = MAX_POINTS) -> np.ndarray:
    """Indices of at most `most` points, ascending: of each of most / 4 intervals the first, the lowest, the highest and
    the last. No spike is lost, however short. y: [n] float64, n any."""
    if len(y) <= most:
        return np.arange(len(y))
    # Four points an interval, and len(y) > most: no interval is empty.
    edges = np.linspace(0, len(y), most // 4 + 1).astype(np.int64)
    found = [0]
    for start, end in itertools.pairwise(edges):
        part = y[start:end]
        found += [start, start + int(part.argmin()), start + int(part.argmax()), end - 1]
    # Sorted too: the lowest may come after the highest.
    return np.unique(np.array(found))


def thinned(curve: Curve, most: int = MAX_POINTS) -> Curve:
    return curve.take(extremes(curve.y, most))


def evenly(count: int, most: int) -> np.ndarray:
    """Indices of at most `most` of `count` things at equal distances, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64)) if count else np.arange(0)


def smoothing_span(count: int) -> int:
    """Points that a smoothed curve of `count` points averages over: 2%, at most 500; of less than 100 points 1."""
    return min(max(count // 50, 1), 500)


def smoothed(curve: Curve) -> Curve:
    """The mean of the last `smoothing_span` points at each point, of those that there are at the beginning."""
    span = smoothing_span(len(curve))
    sums = np.convolve(curve.y, np.ones(span))[: len(curve)]  # no running sum: one huge value would cost its digits
    # The first points have fewer than `span` terms in their sums.
    return Curve(curve.x, sums / np.minimum(np.arange(1, len(curve) + 1), span))
