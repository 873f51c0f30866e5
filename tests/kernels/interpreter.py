"""Triton's interpreter on the CPU."""

from typing import Any

__all__ = ["adapt_interpreter"]


def adapt_interpreter() -> None:
    """Let loops run to bounds that a kernel loads, and dots be asked for in the precisions that a GPU has.

    The interpreter's scalars are arrays of one element, which numpy from 2.4 on no longer takes as the bounds of a range; its
    dots are fp32 whatever is asked for.
    """
    from dataclasses import replace

    from triton.runtime import interpreter

    options = interpreter.interpreter_builder.options
    allowed = (*options.allowed_dot_input_precisions, "bf16x3")
    interpreter.interpreter_builder.options = replace(options, allowed_dot_input_precisions=allowed)

    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor: Any, scope: Any) -> None:  # noqa: ANN401 # triton ships no types
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_with_index
