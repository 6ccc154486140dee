"""Small data sets to try things with: `digits()`, which is part of the package, and `mnist()`."""

from __future__ import annotations

from parti.data.digits import digits
from parti.data.mnist import mnist
from parti.data.pictures import Pictures

__all__ = ["Pictures", "digits", "mnist"]
