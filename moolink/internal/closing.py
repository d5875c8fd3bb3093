"""Objects that are closed at the end of a `with` statement."""

from __future__ import annotations

import abc
from typing import Self


class Closing(abc.ABC):
    """Closes itself at the end of a `with` statement, however that ends."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
