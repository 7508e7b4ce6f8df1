"""A repair of Triton's interpreter, which the kernels' tests run in."""

# mypy: disable-error-code="import-untyped,import-not-found"

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter


def patch_interpreter() -> None:
    """Let a computed scalar bound a loop: it is an array of one element, which NumPy 2.4 does not
    turn into an int."""
    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: Any, *more: Any) -> None:
        patch(tensor, *more)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patch_and_mend
