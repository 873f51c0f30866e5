"""Triton's interpreter on the CPU."""

from typing import Any

__all__ = ["adapt_interpreter"]


def adapt_interpreter() -> None:
    """Let loops run to bounds that a kernel loads.

    The interpreter's scalars are arrays of one element, which numpy from 2.4 on no longer takes as the bounds of a range.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor: Any, scope: Any) -> None:  # noqa: ANN401 # triton ships no types
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_with_index
