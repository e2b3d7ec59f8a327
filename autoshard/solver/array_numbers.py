"""Numbers for arrays: equal ones have the same."""

import math

import numpy as np


class ArrayNumbers:
    """Numbers arrays by content, in order of first appearance; each object, which must outlive this, is looked at once.

    Args:
      dtype: What the arrays are taken as; by default each as it is.
    """

    def __init__(self, dtype: type | None = None) -> None:
        self._dtype = dtype
        self._by_content: dict[tuple[tuple[int, ...], bytes], int] = {}
        self._by_identity: dict[int, int] = {}

    def of(self, array: np.ndarray) -> int:
        """The number of an array."""
        number = self._by_identity.get(id(array))
        if number is None:
            plain = np.ascontiguousarray(array, self._dtype) + 0  # -0.0 is 0.0
            number = self._by_content.setdefault((plain.shape, plain.tobytes()), len(self._by_content))
            self._by_identity[id(array)] = number
        return number

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of each array."""
        return [shape for shape, _ in self._by_content]

    def joined(self) -> tuple[np.ndarray, np.ndarray]:
        """All arrays in one of `dtype`, row-major, and where each begins: int64, one more entry than arrays."""
        start = np.cumsum([0, *map(math.prod, self.shapes)], dtype=np.int64)
        return np.frombuffer(b"".join(content for _, content in self._by_content), self._dtype).copy(), start
